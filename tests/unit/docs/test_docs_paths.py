# SPDX-License-Identifier: Apache-2.0
"""What documents and docstrings say is so: files, headings, exit statuses, keys of the ledger, versions."""

import ast
import json
import re
import runpy
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.source_trees import PACKAGE, nodes
from tests.unit.docs.markdown import DOCUMENTS, ROOT, anchors
from tests.unit.ledger.test_ledger_digests import HEADER, RECORD
from tp_invariant_recipes.cli.main import app
from tp_invariant_recipes.comparison import compare
from tp_invariant_recipes.features.verify import verdict
from tp_invariant_recipes.ledger.lines import encode_step

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


# Verdict -> exit status, of all that give a verdict. The last two are of `tpi audit`.
STATUSES = {
    **{item.value: status for item, status in compare.EXIT_STATUS.items()},
    **verdict.EXIT_STATUS,
    "within rounding": 0,
    "beyond rounding": 1,
}
MEANING = {0: "done or identical", 1: "different", 2: "a mistake", 130: "Ctrl-C"}


def documented_statuses() -> list[tuple[str, int, str]]:
    """Document, status and the verdict beside it, of every table of exit statuses."""
    return [
        (document.name, int(status), row[at + 1].strip("`"))
        for document in DOCUMENTS
        for header, rows in document.tables
        if "exit status" in header
        for at in [header.index("exit status")]
        for row in rows
        for status in row[at].split(", ")
    ]


def test_a_documented_status_is_the_codes():
    rows = documented_statuses()
    assert {name for name, _, _ in rows} == {"docs/exit-statuses.md"}  # the other pages link to it
    assert {*STATUSES} <= {verdict for _, _, verdict in rows}
    for name, status, meaning in rows:
        assert status in MEANING, name
        known = [verdict for verdict in STATUSES if re.match(rf"{verdict}\b", meaning)]
        assert [STATUSES[verdict] for verdict in known] in ([], [status]), (name, meaning)


def test_the_help_names_every_status():
    assert [status for status in MEANING if not re.search(rf"\b{status} {MEANING[status]}", app.info.epilog)] == []


def end_numbers(nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers that code ends with where it does not take them from a table."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    exits = [call for call in calls if re.search(r"(?:\.|^)(?:Exit|exit|_exit|SystemExit)$", ast.unparse(call.func))]
    return {
        arg.value for call in exits for arg in call.args if isinstance(arg, ast.Constant) and type(arg.value) is int
    }


def test_a_command_never_ends_with_1_by_itself():
    commands = {file: inner for file, inner in nodes().items() if file.parts[0] == "cli"}
    assert commands
    assert {file for file, inner in commands.items() if not end_numbers(inner) <= {0, 2, 130}} == set()
    planted = "import typer\nraise typer.Exit(1)\nsys.exit(2)\nraise SystemExit(130)\n"
    assert end_numbers(ast.walk(ast.parse(planted))) == {1, 2, 130}


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "ledger-table"))
PAGE = (ROOT / "docs" / "ledger.md").read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_dataclasses():
    assert SCRIPT["page"](PAGE) == PAGE


def test_every_key_of_a_step_has_a_row():
    assert set(json.loads(encode_step(RECORD, HEADER))) <= set(SCRIPT["fields"](type(RECORD)))


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = {
    name: version
    for file in sorted((ROOT / "scripts" / "lock" / "x86_64").glob("*.txt"))
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)
}

# As documents call them -> distribution. What follows the name there, if it is a version, is the pinned one.
CALLED = {
    "Megatron-Bridge": "megatron-bridge", "Bridge": "megatron-bridge", "megatron-bridge": "megatron-bridge",
    "Megatron-Core": "megatron-core", "torchvision": "torchvision", "nvidia-resiliency-ext": "nvidia-resiliency-ext",
    "PyTorch": "torch", "Transformer Engine": "transformer-engine",
}  # fmt: skip
NAMED = re.compile(rf"\b({'|'.join(CALLED)})\b(?:\*\*|`)?:? ?(?:==)?\s?(\d+\.\d+\.\d+)")


def versions_named(text: str) -> list[tuple[str, str]]:
    """Distributions and versions that a text names."""
    return [(CALLED[name], version) for name, version in NAMED.findall(text)]


def test_a_version_in_the_documents_is_the_locked_one():
    for document in DOCUMENTS:
        if document.name in ("README.md", "docs/install.md"):
            assert [(n, v) for n, v in versions_named(document.text) if LOCKED[n] != v] == [], document.name


def test_one_python():
    (version,) = re.findall(r">=(3\.\d+)", PROJECT["requires-python"])
    tools = (ROOT / "pyproject.toml").read_text()
    assert f'python_version = "{version}"' in tools
    assert f'target-version = "py{version.replace(".", "")}"' in tools
    bootstrap = (ROOT / "scripts" / "bootstrap").read_text()
    assert set(re.findall(r"\bpython(3\.\d+)", bootstrap)) == {version}
    for document in DOCUMENTS:
        assert set(re.findall(r"\bPython (3\.\d+)", document.text)) <= {version}, document.name
