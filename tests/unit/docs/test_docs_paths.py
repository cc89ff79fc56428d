"""Every file that documents and docstrings name is there, and so is every heading that a link goes to."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.docs.markdown import DOCUMENTS, ROOT, anchors

PACKAGE = ROOT / "tp_invariant_recipes"
# A path with a folder in it: of a source, a document, a template, a lock; or anything under these folders of ours.
ENDING = re.compile(r"(?<![\w./~<-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|j2|txt|ya?ml|toml))(?![\w/*])")
UNDER = re.compile(r"(?<![\w./~-])((?:docs|scripts|conf|slurm|tests)/[\w./-]*[\w/])(?![\w*{])")
MODULES = sorted(PACKAGE.rglob("*.py"))
# Of other repositories, of a user's own tree, and what stands for a file.
FOREIGN = (r"^(?:megatron|peft|scripts/training)/", r"^(?:cluster/mysite|data/books)\.yaml$", r"(?:^|/)(?:NAME|PATH)\b")
ELSEWHERE = re.compile("|".join(FOREIGN))


def paths(text: str) -> set[str]:
    """Files of this repository that a text names."""
    results = {path.rstrip(".") for path in (*ENDING.findall(text), *UNDER.findall(text))}
    return {path for path in results if not ELSEWHERE.search(path)}


def exists(path: str, beside: Path) -> bool:
    """From the root, the package, its configuration, or the file that names it; a module with or without its ending."""
    return any((folder / path).exists() or (folder / f"{path}.py").exists() for folder in (ROOT, PACKAGE, beside))


def docstrings(file: Path) -> str:
    """The docstrings and comments of a module."""
    source = file.read_text()
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    comments = re.findall(r"#.*", source)
    return "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *comments])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_file_that_a_document_names_is_there(document):
    text = "\n".join((*document.spans, document.prose))
    results = paths(re.sub(r"\]\([^)]*\)|https?://\S+", "", text))
    assert {path for path in results if not exists(path, (ROOT / document.name).parent)} == set()


def test_a_file_that_a_docstring_names_is_there():
    """One test of all modules: to pytest, 300 of its own would be more work than they do."""
    named = {file: paths(re.sub(r"https?://\S+", "", docstrings(file))) for file in MODULES}
    assert any(named.values())
    assert [(file, path) for file, results in named.items() for path in results if not exists(path, file.parent)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_link_leads_somewhere(document):
    for link in document.links:
        path, _, anchor = link.partition("#")
        target = (ROOT / document.name).parent / path if path else ROOT / document.name
        assert target.exists(), link
        if anchor:
            assert anchor in set(anchors(target.read_text())), link


def test_a_file_that_is_not_there_is_seen():
    text = "see `docs/nowhere.md`, config/nothing.py, scripts/none and tests/unit/docs; not https://x/docs/y.md"
    results = {path for path in paths(re.sub(r"https?://\S+", "", text)) if not exists(path, ROOT)}
    assert results == {"docs/nowhere.md", "config/nothing.py", "scripts/none"}
