"""The texts that code can print, as patterns: string constants and f-strings of Python, quoted strings of bash."""

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.source_trees import PROJECT, nodes

HOLE = "\0"  # where a value stands
WORDS = re.compile(r"\b[a-z]{2,}(?:[ ,;:']+[a-z]{2,}){2,}")  # three words of a sentence, one after the other
CLAUSE = re.compile(r"[:;,.](?= |\0|$)| \(|\0")
EDGES = " ;:,"
LETTERS = 8  # of a pattern, that a quotation must have


@dataclass(frozen=True)
class Template:
    """A text with holes."""

    text: str

    def match(self, text: str) -> re.Match[str] | None:
        """The values in the holes, where the whole of `text` is this template's."""
        literals = self.text.split(HOLE)
        if not all(literal in text for literal in literals):
            return None
        return re.fullmatch("(.*?)".join(map(re.escape, literals)), text, re.DOTALL)

    @property
    def letters(self) -> int:
        return sum(letter.isalpha() for letter in self.text)


def of_python(nodes: list[ast.AST]) -> Iterable[str]:
    """Constants, with holes for str.format, and f-strings; no docstrings."""
    skipped = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    skipped |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            # A hole may hold texts of its own: f"{'a' if b else 'c'}".
            for part in node.values:
                inner = [*ast.walk(part.value)] if isinstance(part, ast.FormattedValue) else []
                if any(isinstance(node, ast.Constant) for node in inner):
                    yield from of_python(inner)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield re.sub(r"\{\w*\}", HOLE, node.value)


def of_bash(source: str) -> Iterable[str]:
    """Strings in quotes; variables and Jinja's values are holes."""
    for text in (*re.findall(r'"([^"\n]+)"', source), *re.findall(r"'([^'\n]+)'", source)):
        yield re.sub(r"\{\{.*?\}\}|\$\{[^}]*\}|\$\([^)]*\)|\$\w+", HOLE, text)


@functools.cache
def templates() -> list[Template]:
    """Every text of the package, of the scripts and of the job templates that has enough letters of its own."""
    texts: set[str] = set()
    for inner in nodes().values():
        texts.update(of_python(inner))
    for file in [*(PROJECT / "slurm").glob("*.j2"), *filter(Path.is_file, (PROJECT / "scripts").iterdir())]:
        source = file.read_text()
        is_python = source.startswith("#!/usr/bin/env python") or file.suffix == ".py"
        texts.update(of_python([*ast.walk(ast.parse(source))]) if is_python else of_bash(source))
    results = (Template(text) for text in texts)
    return [template for template in results if template.letters >= LETTERS]


def unexplained(quotation: str, known: Iterable[Template]) -> str | None:
    """The part of a quotation that no template prints; None: all of it is some template's.

    A quotation is a template's text, to its end or to the end of a clause, with values in its holes. A value that is a
    sentence is itself a template's. With `…` at its end a quotation may stop anywhere.
    """
    known = list(known)
    closest = quotation
    for template in known:
        start = template.text.strip(EDGES).partition(HOLE)[0]
        if not quotation.startswith(start[:LETTERS]):  # nor does any beginning of it
            continue
        for short in _beginnings(template, anywhere=quotation.endswith("…")):
            match = short.match(quotation.removesuffix("…").rstrip())
            if not match:
                continue
            values = [value.strip(EDGES) for value in match.groups()]
            remaining = [part for value in values if value != quotation for part in _missing(value, known)]
            if not remaining:
                return None
            closest = min(closest, remaining[0], key=len)
    head, *tail = quotation.split("; ", 1)  # as a Problem joins its text and what solves it
    if tail and closest == quotation and unexplained(head, known) is None:
        return unexplained(tail[0], known)
    return closest


def _missing(value: str, known: list[Template]) -> list[str]:
    """What no template prints of a value: of all of it, or of its clauses."""
    if not WORDS.search(value) or unexplained(value, known) is None:
        return []
    clauses = value.split("; ")
    return [value] if len(clauses) == 1 else [part for clause in clauses for part in _missing(clause, known)]


@functools.cache
def _beginnings(template: Template, *, anywhere: bool) -> tuple[Template, ...]:
    """The template's text to the end of each clause, or to any place; those that have enough letters."""
    text = template.text.strip(EDGES)
    ends = range(len(text)) if anywhere else [place.start() for place in CLAUSE.finditer(text)]
    beginnings = (Template(text[:end].rstrip()) for end in (*ends, len(text)))
    return tuple(short for short in beginnings if short.letters >= LETTERS)
