"""The lines of a file of scores: one sequence each, in the order of the input.

    {"id": 7, "first": 3, "token_ids": [5, 9], "logprobs": [-1.25, -0.5],
     "bits": ["bfa00000", "bf000000"], "sum": -1.75}

Decimals are the shortest that give the fp32 back; bits are the fp32's, in hex. sum is exact, rounded once to fp64.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.data import sequences

TIMES = "times.jsonl"  # beside the lines
WHOLE = ("ranks",)  # columns of whole numbers
DIGEST = ("digest_high", "digest_low")  # columns that are one number of 64 bits, in hex: fp64 holds 32


def append(
    file: Path,
    window: Sequence[sequences.Sequence],
    scores: Sequence[np.ndarray],
    columns: Sequence[str],
    computed: tuple[int, float],
) -> None:
    """Write the lines of a window and wait until they are on the disk; then what it took, beside them.

    scores: [columns, scored] fp64 of each. computed: tokens, and seconds of their forward passes.
    """
    with file.open("ab") as stream:
        for sequence, values in zip(window, scores, strict=True):
            stream.write(line(sequence, values, columns))
        stream.flush()
        os.fsync(stream.fileno())
    with file.with_name(TIMES).open("a") as stream:
        stream.write(f"{json.dumps(computed)}\n")


def tokens_per_second(file: Path) -> float | None:
    """Measure forward passes without the first window, which compiles and tries products; None: there was no other."""
    times = [json.loads(line) for line in file.with_name(TIMES).read_text().splitlines()][1:]
    return sum(tokens for tokens, _ in times) / sum(seconds for _, seconds in times) if times else None


def line(
    sequence: sequences.Sequence, values: np.ndarray, columns: Sequence[str], start: Mapping[str, Any] | None = None
) -> bytes:
    """Format one line. values: [columns, scored] fp64. start: what it begins with; None: id and first."""
    logprobs = values[0].astype(np.float32)
    fields = {name: _decimals(column, name) for name, column in zip(columns, values, strict=True) if name not in DIGEST}
    bits = '","'.join(f"{bits:08x}" for bits in logprobs.view(np.uint32).tolist())
    start = {"id": sequence.id, "first": sequence.first} if start is None else start
    texts = {name: json.dumps(value) for name, value in start.items()}
    texts["token_ids"] = json.dumps(sequence.tokens[sequence.first :])
    texts |= fields | {"bits": f'["{bits}"]', "sum": repr(math.fsum(logprobs.tolist()))}
    if DIGEST[0] in columns:
        halves = (values[columns.index(name)].astype(np.int64).tolist() for name in DIGEST)
        texts["digests"] = json.dumps([f"{high:08x}{low:08x}" for high, low in zip(*halves, strict=True)])
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}\n").encode()


def _decimals(column: np.ndarray, name: str) -> str:
    texts = map(str, column.astype(np.int64).tolist()) if name in WHOLE else column.astype(np.float32).astype(str)
    return f"[{', '.join(texts)}]"


def complete(file: Path) -> int:
    """Return the whole lines of a file; what follows the last of them is cut off."""
    if not file.exists():
        return 0
    count, at = 0, 0
    with file.open("rb+") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            if (end := block.rfind(b"\n")) >= 0:
                at = stream.tell() - len(block) + end + 1
        stream.truncate(at)
    return count
