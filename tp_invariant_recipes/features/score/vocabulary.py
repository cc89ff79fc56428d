# SPDX-License-Identifier: Apache-2.0
"""OUT.vocab.npy: log-probabilities of the whole vocabulary, float32 [scored tokens, vocabulary], in the order of OUT.

A digest tells that two rows differ. How many entries differ only the entries tell: 4 bytes each, 600 KB a token of
151,936 entries. Every rank writes its own rows and columns into the one file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_invariant_recipes.errors import ConfigError, reason
from tp_invariant_recipes.features.score import engine_scores
from tp_invariant_recipes.files import free_bytes
from tp_invariant_recipes.sizing.memory import GIB

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 256  # that are compared at a time


def beside(scores: Path) -> Path:
    """Name the file of the vocabulary that belongs to scores."""
    return scores.with_name(f"{scores.name}.vocab.npy")


def create(file: Path, tokens: int, entries: int) -> None:
    """Make the file, or keep an earlier start's file. ConfigError: the disk has too little space."""
    if file.exists() and np.load(file, mmap_mode="r").shape == (tokens, entries):
        return
    size, free = 4 * tokens * entries, free_bytes(file.parent)
    if size > free:
        raise ConfigError(
            f"--vocab writes {size / GIB:.3g} GiB of {tokens:,} tokens × {entries:,} entries; {free / GIB:.3g} GiB are "
            f"free for {file}: score fewer sequences, or --digest, which tells which tokens differ"
        )
    np.lib.format.open_memmap(file, mode="w+", dtype="<f4", shape=(tokens, entries)).flush()


def publish(lines: Path, out: Path) -> None:
    """Put the finished file beside the scores' final name."""
    os.replace(beside(lines), beside(out))


class VocabularyRows:
    """The rows of a file that this rank writes. start: the row of the first token of each sequence of a window."""

    def __init__(self, file: Path) -> None:
        self._table = np.load(file, mmap_mode="r+")
        self.start: list[int] = []

    def write(self, rows: "Tensor", values: "Tensor", column: int) -> None:
        """rows: [n] int64 on the host. values: [n, vocab/t] fp32, from `column` on; padding at the end is left out."""
        kept = max(0, min(values.shape[1], self._table.shape[1] - column))
        self._table[rows.numpy(), column : column + kept] = values[:, :kept].float().cpu().numpy()


def compare(scores: Path, file: Path) -> dict[str, int | float]:
    """Count entries whose bits differ, and tokens with some, of what both files have. ConfigError: they do not fit."""
    own, other = _spans(scores), _spans(file)
    tables = [_table(path, spans) for path, spans in ((scores, own), (file, other))]
    if tables[0].shape[1] != tables[1].shape[1]:
        raise ConfigError(
            f"{beside(file)} has {tables[1].shape[1]} entries a token, and the model {tables[0].shape[1]}"
        )
    count = dict.fromkeys(("tokens", "differing_tokens", "entries", "differing"), 0)
    largest = 0.0
    for place, (name, (_, end)) in enumerate(own.items()):
        begin, other_end = other.get(name) or other.get((place,)) or (0, 0)
        both = min(end - own[name][0], other_end - begin)
        for row in range(-both, 0, ROWS):
            last = min(row + ROWS, 0)
            own_rows, others = tables[0][end + row : end + last], tables[1][other_end + row : other_end + last]
            differ = own_rows.view("<u4") != others.view("<u4")
            count["tokens"] += len(own_rows)
            count["entries"] += own_rows.size
            count["differing"] += int(differ.sum())
            count["differing_tokens"] += int(differ.any(1).sum())
            far = np.abs(own_rows[differ].astype(np.float64) - others[differ])
            largest = max(largest, float(np.nan_to_num(far, nan=np.inf).max(initial=0.0)))
    return {**count, "largest": largest}


def check(file: Path | None) -> list[str]:
    """Problems of a file to compare with, which must have one beside it; None: nothing is compared."""
    if file is None or beside(file.expanduser()).is_file():
        return []
    return [
        f"--vocab: {file} has no {beside(file).name}, which tpi score --vocab writes, or an engine: float32 [tokens, "
        "entries]"
    ]


def text(report: Mapping[str, Any]) -> str:
    """Return the end of the sentence of a comparison."""
    largest = f", at most by {report['largest']:.3g}" if report["differing"] else ""
    return (
        f"; of the whole vocabulary, {report['differing']:,} of {report['entries']:,} entries differ in "
        f"{report['differing_tokens']:,} of {report['tokens']:,} tokens{largest}"
    )


def _spans(file: Path) -> dict[Any, tuple[int, int]]:
    """Id, or (place,) in a file without ids -> the first row of a sequence, and the one after its last."""
    spans: dict[Any, tuple[int, int]] = {}
    row = 0
    for place, line in enumerate(engine_scores.read(file)):
        spans[(place,) if line.id is None else line.id] = row, row + len(line.tokens)
        row += len(line.tokens)
    return spans


def _table(file: Path, spans: Mapping[Any, tuple[int, int]]) -> np.ndarray:
    try:
        table = np.load(beside(file.expanduser()), mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{beside(file)}: {reason(error)}") from error
    tokens = max((end for _, end in spans.values()), default=0)
    if table.ndim != 2 or table.dtype != np.dtype("<f4") or len(table) != tokens:
        raise ConfigError(
            f"{beside(file)} has {table.dtype} {[*table.shape]}; for {file} it must have float32 [{tokens}, entries]"
        )
    return table
