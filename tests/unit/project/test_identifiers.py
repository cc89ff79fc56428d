"""Identifiers are nouns and verbs of the field, and a docstring explains parameters and fields that exist."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from tests.source_trees import nodes, other_trees

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
STORED = ast.Store()
# Pronouns, participles and sides that tell a reader nothing: write what it is (override, problems, rank, match).
WORDS = {"again", "apart", "found", "left", "meant", "of", "one", "ours", "right", "said", "some", "theirs", "together"}
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a name: between underscores, or begun by a capital
NUMBERS = {"BELOW_ONE", "ONE_BITS", "ONE_FP32", "in_one_launch"}  # names that have the number 1
# What one name of the field has replaced: TensorPart, and names that said less than they hold.
REPLACED = {
    "APART", "Asked", "Both", "GlobalSlice", "Held", "IDLE", "InFp8", "KEPT", "LATER", "Lie", "OURS", "OfTE", "Part",
    "Parts", "Piece", "Placed", "RULED", "Said", "Seat", "StoredRange", "Story", "drop_ours", "hear", "in_vain",
    "nothing_else", "senses", "together_is_right",
}  # fmt: skip
# A line or a sentence "name: …" or "name, name: …", and what such a line explains other than parameters.
ENTRY = re.compile(r"(?:^|(?<=\. ))([a-z_]\w*(?:, [a-z_]\w*)*):(?=\s)", re.MULTILINE)
NO_PARAMETERS = {"returns", "raises", "yields"}


# What binds a name → the attribute that holds it.
BINDING = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "asname"} | dict.fromkeys(
    (*FUNCTIONS.__args__, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar), "name"
)


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, str]]:
    """The name of everything that is bound: variables, fields, attributes, parameters, functions, classes, imports."""
    for node in nodes:
        field = BINDING.get(type(node))
        if field and isinstance(getattr(node, "ctx", STORED), ast.Store):
            yield node, getattr(node, field) or ""


@cache
def parts(name: str) -> frozenset[str]:
    return frozenset(part.lower() for part in PART.findall(name))


def vague(nodes: Iterable[ast.AST]) -> list[str]:
    """Identifiers that are or contain a word of the list, and names that were replaced.

    A field `of_` has the key `of` of a file; `of` within a name is a preposition (`layout_of`). The name of a test is a
    sentence, which may count.
    """
    lines = []
    for node, name in identifiers(nodes):
        words = set(parts(name))
        if len(words) > 1:
            words -= {"of", "one"} if name.startswith("test_") or name in NUMBERS else {"of"}
        if (words & WORDS and name != "of_") or name.lstrip("_") in REPLACED:
            lines.append(f"{node.lineno}: {name}")
    return lines


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def members(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Fields, methods, their parameters and the attributes that they read or set, of the class and its bases."""
    names = {name for _, name in identifiers(ast.walk(node))}
    names |= {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            names |= members(classes[base.id], classes)
    return names


def missing(nodes: Iterable[ast.AST], classes: dict[str, ast.ClassDef]) -> list[str]:
    """Entries of docstrings for names that do not exist. What returns a dict may explain its keys."""
    lines = []
    for node in nodes:
        if not isinstance(node, FUNCTIONS | ast.ClassDef):
            continue
        entries = {name for entry in ENTRY.findall(ast.get_docstring(node) or "") for name in entry.split(", ")}
        if not entries or (isinstance(node, FUNCTIONS) and node.returns and "dict" in ast.unparse(node.returns)):
            continue
        known = members(node, classes) if isinstance(node, ast.ClassDef) else parameters(node)
        lines += [f"{node.lineno}: {node.name} has no {name}" for name in entries - known - NO_PARAMETERS]
    return lines


def vague_in(source: str) -> list[str]:
    return vague(ast.walk(ast.parse(source)))


PLANTED = (
    "found = []",
    "_said = 1",
    "OURS = ()",
    "for one in range(3): pass",
    "[left for left, _ in pairs]",
    "for name, right in pairs: pass",
    "def f(*, theirs): ...",
    "def of(config): ...",
    "for name, of in pairs: pass",
    "class C:\n    of: int",
    "match value:\n    case [*some]: pass",
    "class Apart: ...",
    "class C:\n    some: int = 1",
    "self.again = True",
    "import numpy as right",
    "try: pass\nexcept OSError as one: pass",
    "if (one := f()): pass",
    "experts_apart = True",
    "def one_by_one(): ...",
    "def _computed_again(config): ...",
    "class CellState:\n    SOME_DIFFER = 2",
    "class LeftOut: ...",
    "def f(found_by=None): ...",
    "def test_a_mistake_is_said(): ...",
    "_RULED = 1",
    "class Placed: ...",
    "self._nothing_else = None",
)


def test_a_word_of_the_list_is_seen_wherever_it_is_bound():
    assert [planted for planted in PLANTED if len(vague_in(planted)) != 1] == []


def test_uses_strings_and_numbers_are_no_such_identifiers():
    assert vague_in("x = one.found('said')\noffset, of_, layout_of = 1, 2, 3\nf(right=x)") == []
    assert vague_in("in_a, in_b = pair\nONE_FP32 = 1") == []
    assert vague_in("def test_one_rank(): ...\nbone, someone, bright = 1, 2, 3") == []


def test_no_identifier_and_no_file_has_a_word_of_the_list():
    parsed = nodes() | {file: ast.walk(tree) for file, tree in other_trees().items()}
    lines = [f"{file}:{line}" for file, inner in parsed.items() for line in vague(inner)]
    lines += [str(file) for file in parsed if vague_in(f"{file.stem.replace('-', '_')} = 0")]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "text, name",
    (
        ('def f(given):\n    """A sum. taken: what is added."""', "taken"),
        ('def f(a, b):\n    """A sum.\n\n    a, c: what is added.\n    returns: it.\n    """', "c"),
        ('class C:\n    """A value.\n\n    size: bytes.\n    """\n    count: int', "size"),
    ),
)
def test_an_entry_for_a_parameter_or_field_that_does_not_exist_is_seen(text, name):
    (line,) = missing(ast.walk(ast.parse(text)), {})
    assert line.endswith(f"has no {name}")
    assert missing(ast.walk(ast.parse(text.replace(f"{name}:", "returns:"))), {}) == []


def test_docstrings_explain_parameters_and_fields_that_exist():
    """Without cli/, whose docstrings are the text of --help."""
    parsed = {file: inner for file, inner in nodes().items() if file.parts[0] != "cli"}
    classes = {node.name: node for inner in parsed.values() for node in inner if isinstance(node, ast.ClassDef)}
    lines = [f"{file}:{line}" for file, inner in parsed.items() for line in missing(inner, classes)]
    assert not lines, "\n".join(lines)


def test_no_public_class_has_the_name_of_another():
    """A name in an error or a trace means one thing."""
    files = defaultdict(list)
    for file, inner in nodes().items():
        for node in inner:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(file)
    assert len(files) > 100
    assert {name: defining for name, defining in files.items() if len(defining) > 1} == {}
