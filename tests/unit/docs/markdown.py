# SPDX-License-Identifier: Apache-2.0
"""The documents of the repository, as the guards against drift read them: code, spans, tables and links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Document:
    """A Markdown file. name: its path from the repository's root."""

    name: str
    text: str

    @cached_property
    def _parts(self) -> tuple[list[str], list[str]]:
        """Lines of prose, and lines of code blocks: fenced, or indented by four after an empty line."""
        prose: list[str] = []
        code: list[str] = []
        fenced = indented = False
        before = ""
        for line in self.text.splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif fenced:
                code.append(line)
            elif line.startswith("    ") and (indented or not before.strip()):
                indented = True
                code.append(line[4:])
            else:
                indented = indented and not line.strip()
                (prose if line.strip() or not indented else code).append(line)
            before = line
        return prose, code

    @property
    def prose(self) -> str:
        """All that is in no code block."""
        return "\n".join(self._parts[0])

    @cached_property
    def code(self) -> list[str]:
        """The lines of code blocks; one that a backslash continues is one line."""
        return re.sub(r"\\\n\s*", "", "\n".join(self._parts[1])).splitlines()

    @cached_property
    def spans(self) -> list[str]:
        """What stands between backticks, also where the line breaks within."""
        return [re.sub(r"\s+", " ", span).replace("\\|", "|") for span in CODE.findall(self.prose)]

    @cached_property
    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Header and rows, each a list of cells."""
        result: list[tuple[list[str], list[list[str]]]] = []
        lines = self._parts[0]
        for header, rule, rows in zip(range(len(lines)), range(1, len(lines)), range(2, len(lines) + 1), strict=False):
            if lines[header].startswith("|") and re.fullmatch(r"[|\s:-]+", lines[rule]) and "-" in lines[rule]:
                end = rows
                while end < len(lines) and lines[end].startswith("|"):
                    end += 1
                result.append((_cells(lines[header]), [_cells(line) for line in lines[rows:end]]))
        return result

    @cached_property
    def commands(self) -> list[str]:
        """Command lines of `tpi` in code blocks, without comments and prompts; two joined by && are two."""
        lines = [re.sub(r"\s+# .*", "", line).strip().removeprefix("$ ") for line in self.code]
        parts = [part.strip() for line in lines if line.startswith("tpi ") for part in line.split("&&")]
        return [part for part in parts if part.startswith("tpi ")]

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and images that lie in the repository."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def anchors(text: str) -> Iterator[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _read(path: Path) -> Document:
    return Document(str(path.relative_to(ROOT)), path.read_text())


DOCUMENTS = [
    _read(file)
    for file in (
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "slurm/README.md",
    )
]  # fmt: skip
