"""Every file that documents and docstrings name is there, and so is every heading that a link goes to."""

import ast
import re
from pathlib import Path

from tests.source_trees import PACKAGE, nodes
from tests.unit.docs.markdown import DOCUMENTS, ROOT, anchors

# A path with a folder in it: of a source, a document, a template, a lock; or anything under these folders of ours.
ENDING = re.compile(r"(?<![\w./~<-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|j2|txt|ya?ml|toml))(?![\w/*])")
UNDER = re.compile(r"(?<![\w./~-])((?:docs|scripts|conf|slurm|tests)/[\w./-]*[\w/])(?![\w*{])")
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


def explained(file: Path, inner: list[ast.AST]) -> str:
    """The docstrings and comments of a module."""
    documented = (node for node in inner if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    comments = re.findall(r"#.*", (PACKAGE / file).read_text())
    return "\n".join([*(ast.get_docstring(node, clean=False) or "" for node in documented), *comments])


def test_a_file_that_a_document_names_is_there():
    for document in DOCUMENTS:
        text = "\n".join((*document.spans, document.prose))
        results = paths(re.sub(r"\]\([^)]*\)|https?://\S+", "", text))
        beside = (ROOT / document.name).parent
        assert {path for path in results if not exists(path, beside)} == set(), document.name


def test_a_file_that_a_docstring_names_is_there():
    named = {file: paths(re.sub(r"https?://\S+", "", explained(file, inner))) for file, inner in nodes().items()}
    assert any(named.values())
    lost = [
        (file, path) for file, results in named.items() for path in results if not exists(path, (PACKAGE / file).parent)
    ]
    assert lost == []


def test_a_link_leads_somewhere():
    for document in DOCUMENTS:
        for link in document.links:
            path, _, anchor = link.partition("#")
            target = (ROOT / document.name).parent / path if path else ROOT / document.name
            assert target.exists(), link
            assert not anchor or anchor in set(anchors(target.read_text())), link
