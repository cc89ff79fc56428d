"""Docstrings, messages, help and pages use plain words: a table of phrases that stand in the way of a reader."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.source_trees import nodes

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("*.md", "docs/*.md", "slurm/*.md")


class Phrase(NamedTuple):
    pattern: str
    why: str
    refused: str
    better: str


HISTORY = "a page says what is; git has how it came to be"
PRONOUN = "a reader must look for the noun that the pronoun stands for: repeat it, or use a possessive"
RIDDLE = "a picture for which the field has a plain word"
PHRASES = (
    Phrase(r"\bthat of\b", PRONOUN, "equal to that of the first run", "equal to the first run's"),
    Phrase(r"\bin (the )?place of\b", "instead of, or replaces", "fp32 in place of bf16", "fp32 instead of bf16"),
    Phrase(r"\bkeeps? for itself\b", RIDDLE, "what a graph keeps for itself", "memory private to CUDA graphs"),
    Phrase(r"\bsince then\b", HISTORY, "Since then one rank takes 1.02 ×", "One rank takes 1.02 ×"),
    Phrase(r"\bfirst version\b", HISTORY, "The first version took 4 s", "It takes 2 s"),
    Phrase(r"\bnobody has measured\b", HISTORY, "nobody has measured B300", "B300: not measured"),
    Phrase(r"\b(of now|rows of before)\b", HISTORY, "the definition of now", "the current definition"),
    Phrase(r"\btak(es?|en) for granted\b", RIDDLE, "what the rules take for granted", "fields that the rules need"),
    Phrase(r"\b(come|comes|came) apart\b", RIDDLE, "what ranks compute has come apart", "ranks have diverged"),
    Phrase(r"\b(go|goes|gone|went) on with\b", "continue", "go on with the run", "continue the run"),
    Phrase(r"\bleft no word\b", RIDDLE, "it left no word of its end", "it recorded no exit status"),
    Phrase(r"\bin front of the invariant\b", RIDDLE, "in front of the invariant one", "bypasses the invariant one"),
    Phrase(r"\bseen to (give|work|be right)\b", RIDDLE, "not yet seen to give", "not yet validated with"),
    Phrase(r"\ba whole that\b", RIDDLE, "a whole that one field would replace", "a preset"),
    Phrase(r"\b(is|are|was|were) (said|spelt)\b", "who, or where?", "a full disk is said", "tpi reports a full disk"),
    Phrase(r"\bthe mending\b", RIDDLE, "without the mending", "with the patch disabled"),
    Phrase(r"\bin vain\b", "failed", "tried in vain", "tried and failed"),
    Phrase(
        r"(^|[.:;] )(Checked|Compared|Counted|Read|Refused|Shown|Written) (is|are)\b",
        "subject first",
        "Compared are the digests",
        "tpi compares the digests",
    ),
)
# Of docstrings alone: tools show each without the one above it.
DOCSTRINGS = (Phrase(r"^The same\b", "the same as what?", "The same for a digest.", "The part, as a digest takes it."),)


def docstrings() -> Iterator[tuple[str, str]]:
    for file, inner in nodes().items():
        for node in inner:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""


def texts() -> Iterator[tuple[str, str]]:
    """All strings of the package, docstrings, messages and help alike, and all pages."""
    for file, inner in nodes().items():
        for node in inner:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file}:{node.lineno}", node.value
    for file in (file for pattern in PAGES for file in ROOT.glob(pattern)):
        yield str(file.relative_to(ROOT)), file.read_text()


def refused_phrases(phrases: tuple[Phrase, ...], texts: Iterator[tuple[str, str]]) -> list[str]:
    """Where a phrase stands, with the words around it."""
    table = [(re.compile(phrase.pattern, re.IGNORECASE), phrase) for phrase in phrases]
    any_phrase = re.compile("|".join(phrase.pattern for phrase in phrases), re.IGNORECASE)
    lines = []
    for where, text in texts:
        text = " ".join(text.split())
        if not any_phrase.search(text):
            continue
        for pattern, phrase in table:
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                lines.append(f"{where}: …{around}…: {phrase.why}")
    return lines


def test_a_phrase_is_detected_and_its_better_version_is_not():
    for phrase in (*PHRASES, *DOCSTRINGS):
        assert refused_phrases((phrase,), iter([("here", phrase.refused)])), phrase
        assert not refused_phrases((phrase,), iter([("here", phrase.better)])), phrase


def test_no_text_has_a_phrase_of_the_table():
    assert refused_phrases(PHRASES, texts()) == []
    assert refused_phrases(DOCSTRINGS, docstrings()) == []
