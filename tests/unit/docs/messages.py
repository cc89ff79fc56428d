"""The texts that code can print, as patterns: string constants and f-strings of Python, quoted strings of bash."""

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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


def of_python(source: str) -> Iterable[str]:
    """Constants, with holes for str.format, and f-strings; no docstrings."""
    tree = ast.parse(source)
    skipped = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            # A hole may hold texts of its own: f"{'a' if b else 'c'}".
            for part in node.values:
                if isinstance(part, ast.FormattedValue) and any(
                    isinstance(inner, ast.Constant) for inner in ast.walk(part.value)
                ):
                    yield from of_python(ast.unparse(part.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield re.sub(r"\{\w*\}", HOLE, node.value)


def of_bash(source: str) -> Iterable[str]:
    """Strings in quotes; variables and Jinja's values are holes."""
    for text in (*re.findall(r'"([^"\n]+)"', source), *re.findall(r"'([^'\n]+)'", source)):
        yield re.sub(r"\{\{.*?\}\}|\$\{[^}]*\}|\$\([^)]*\)|\$\w+", HOLE, text)


def templates(root: Path) -> list[Template]:
    """Every text of the package, of the scripts and of the job templates that has enough letters of its own."""
    texts: set[str] = set()
    for file in sorted((root / "tp_invariant_recipes").rglob("*.py")):
        texts.update(of_python(file.read_text()))
    for file in sorted((root / "slurm").glob("*.j2")):
        texts.update(of_bash(file.read_text()))
    for file in sorted((root / "scripts").iterdir()):
        if file.is_file():
            is_python = file.read_text().startswith("#!/usr/bin/env python") or file.suffix == ".py"
            texts.update(of_python(file.read_text()) if is_python else of_bash(file.read_text()))
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
