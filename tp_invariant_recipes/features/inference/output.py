# SPDX-License-Identifier: Apache-2.0
"""OUT, a file that a command writes in OUT.partial until it is whole, and OUT.meta.json: what decides its lines.

A line is a sequence, in the order of the input:

    {"id": 7, "first": 3, "token_ids": [5, 9], "logprobs": [-1.25, -0.5],
     "bits": ["bfa00000", "bf000000"], "sum": -1.75}

Decimals are the shortest that give the fp32 back; bits are the fp32's, in hex. sum is exact, rounded once to fp64.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.files import sync_folder, write_atomically
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.reading import MIB, open_file, parse_json, read_limited
from tp_invariant_recipes.runs.run_dir import RunDir, writing
from tp_invariant_recipes.text import plural

WRITTEN = "written"  # key of OUT.meta.json: hash and number of OUT's lines
WHOLE = ("ranks",)  # columns of whole numbers
DIGEST = ("digest_high", "digest_low")  # columns that are one number of 64 bits, in hex: fp64 holds 32


def meta(out: Path) -> Path:
    """Name OUT.meta.json."""
    return out.with_name(f"{out.name}.meta.json")


def partial(out: Path) -> RunDir:
    """Name OUT.partial."""
    return RunDir(out.with_name(f"{out.name}.partial"))


def finished(out: Path, what: str, serves: Callable[[Any], bool]) -> bool:
    """Whether OUT serves, given its identity. RunError: it holds others, or was changed. what: its lines, in words."""
    if not out.exists():
        return False
    before = read_json(meta(out))
    if not isinstance(before, dict) or not serves({k: v for k, v in before.items() if k != WRITTEN}):
        raise RunError(f"{out} exists and holds other {what}: choose another --out FILE, or remove it")
    check_unchanged(out)
    return True


def check_unchanged(out: Path) -> None:
    """Raise RunError: OUT is there, and was changed since it was written."""
    before = read_json(meta(out)) if out.exists() else None
    if isinstance(before, dict) and before.get(WRITTEN) != (now := described(out)):
        raise RunError(
            f"{out} was changed since tpi wrote it: it has {plural(now['lines'], 'line')} and another hash "
            f"than {meta(out).name} says; remove it to compute it again, or choose another --out FILE"
        )


def described(file: Path) -> dict[str, Any]:
    """Return what tells a file of lines from a changed one. Raises RunError."""
    digest, count = hashlib.sha256(), 0
    try:
        with open_file(file) as stream:
            while block := stream.read(MIB):
                digest.update(block)
                count += block.count(b"\n")
    except OSError as error:
        raise RunError(f"{file}: {error.strerror or error}") from error
    return {"sha256": digest.hexdigest(), "lines": count}


def claim(file: Path, identity: dict[str, Any], what: str) -> None:
    """Write the identity of what OUT.partial will have, a file there. Raises RunError: it has others already."""
    if read_json(file) not in (None, identity):
        raise RunError(f"{file.parent} holds a part of other {what}: choose another --out FILE, or remove it")
    with writing(file, "--out FILE"):
        write_atomically(file, json.dumps(identity, indent=2) + "\n")


def publish(whole: Path, out: Path, identity: dict[str, Any]) -> None:
    """Make a whole file of lines OUT, and write OUT.meta.json. Raises OSError."""
    write_atomically(meta(out), json.dumps(identity | {WRITTEN: described(whole)}, indent=2) + "\n")
    os.replace(whole, out)
    sync_folder(out.parent)


def read_json(file: Path) -> Any:
    """Read a JSON file; None: it is not there. Raises RunError."""
    try:
        return parse_json(read_limited(file, LARGEST)) if file.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: {reason(error)}") from error


def numerics_of(file: Path, kind: str = "schema") -> str | None:
    """Return the numerics of a file of `tpi score` or `tpi generate`; None: it is neither. kind: a key of its kind."""
    there = read_json(meta(file.expanduser()))
    numerics = there.get("numerics") if isinstance(there, dict) and kind in there else None
    name = numerics.get("mode") if isinstance(numerics, dict) else None
    return name if name in mode.NAMES else None


def has_digests(file: Path) -> bool:
    """Return whether a file is of `tpi generate --digest`."""
    there = read_json(meta(file.expanduser()))
    return isinstance(there, dict) and "requests" in there and bool(there.get("digests"))


def check_written(out: Path) -> list[str]:
    """Return why OUT cannot be written; empty: it can."""
    folder = out.expanduser().absolute().parent
    if out.expanduser().is_dir():
        return [f"{out}: that is a folder; name a file"]
    if not folder.is_dir():
        return [f"{out}: {folder} is no folder"]
    return [] if os.access(folder, os.W_OK) else [f"{out}: {folder} cannot be written"]


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


class Written:
    """What has been written since the start of the ranks: lines, the tokens of their sequences, and the speed.

    folder, pattern: of the files, to which ranks append lines.
    """

    def __init__(self, folder: Path, pattern: str) -> None:
        self.folder, self.pattern, self.lines, self.tokens, self.seconds = folder, pattern, 0, 0, 0.0
        self._read = {file: file.stat().st_size for file in folder.glob(pattern)}
        self._files = len(self._read)
        self._started: tuple[float, int] | None = None  # when the ranks were ready, and the tokens by then

    def look(self) -> None:
        """Read what is new. A rank opens its file when its model is ready, or when it has its first lines."""
        before = self.lines
        for file in self.folder.glob(self.pattern):
            with file.open("rb") as stream:
                stream.seek(self._read.get(file, 0))
                data = stream.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(data)
            for row in map(json.loads, data.splitlines()):
                self.lines += 1
                self.tokens += row.get("first", 0) + len(row["token_ids"])
        if self._started is None and (len(self._read) > self._files or self.lines):
            self._started = time.monotonic(), self.tokens
        elif self._started is not None and self.lines > before:
            self.seconds = time.monotonic() - self._started[0]

    @property
    def speed(self) -> float | None:
        """Tokens a second, without those of the first look, for which ranks have compiled; None: not known yet."""
        return (self.tokens - self._started[1]) / self.seconds if self._started and self.seconds else None

    @property
    def speed_in_words(self) -> str:
        """Such as "1,200 tokens/s"; empty: not known yet."""
        return f"{self.speed:,.0f} tokens/s" if self.speed else ""


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
