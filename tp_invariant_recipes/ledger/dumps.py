# SPDX-License-Identifier: Apache-2.0
"""Dumps: the values of a few tensors at a few steps, one file per rank and step, and the distance between two dumps.

    RUN/dumps/step-0000003/rank-1.safetensors

A file holds the bits of the rank's pieces of every tensor, as unsigned integers of the values' width. Its metadata
gives the position of each piece (kernels/digest.py) and the number of ranks that wrote a file.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from tp_invariant_recipes.errors import LedgerError, reason
from tp_invariant_recipes.reading import Bounds, Record, checked, parse_json

LARGEST_HEADER = 32 << 20  # bytes; some 300 for each piece
GRADIENT_NORM = "norm/gradients"  # the name of the gradient norm in an audit's recording
LOSS_SHARE = "share/loss"  # and of the number of ranks that gradients are averaged over: each has its own loss
RANKS = "ranks"  # the metadata with the number of files of a step


_KEY = re.compile(r"[0-9]{1,9}")  # of a tensor in a file
_Ranks = Annotated[int, Bounds(gt=0, le=2**20)]
_Size = Annotated[int, Bounds(ge=0, lt=2**40)]  # larger ones are no tensor's


@dataclass(frozen=True)
class DumpedPart(Record):
    """A piece in a file: its tensor, and its position in that tensor's table of rows and columns."""

    name: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], Bounds(max_length=8, strict=False)]  # of the whole tensor
    row: _Size
    step: Annotated[int, Bounds(gt=0, lt=2**40)]
    column: _Size

    def text(self) -> str:
        """Return the text in a file's metadata."""
        return json.dumps(self.as_json())


@dataclass(frozen=True)
class Dumped:
    """A whole tensor. bits: unsigned integers [rows, columns], which in row-major order are the elements of `shape`."""

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray


@dataclass(frozen=True)
class Distance:
    """The distance between two tensors of one dtype and shape.

    total, differing: number of elements, and of elements whose bits differ.
    max_ulp:          the largest distance in ULP, as ledger/bits.py counts them; None: no two numbers differ, or the
                      dtype is not a float.
    max_difference:   the largest |a - b| of numbers, in float64; None: likewise.
    nans:             number of differing elements with at least one NaN; neither maximum includes them.
    first:            index of the first differing element in the whole tensor; None: no element differs.
    """

    total: int
    differing: int
    max_ulp: int | None
    max_difference: float | None
    nans: int
    first: tuple[int, ...] | None


class DumpedRows:
    """A table [rows, columns] in a file, whose rows are read when they are asked for: `rows[3:7]`, float64."""

    def __init__(self, file: Path, key: str, dtype: str) -> None:
        self._slice, self._dtype = _opened(file).get_slice(key), dtype
        self.shape: tuple[int, int] = (*self._slice.get_shape(),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        return _values(self._slice[rows.start : rows.stop], self._dtype)


Table = np.ndarray | DumpedRows


@dataclass(frozen=True)
class RankPart:
    """What a rank has of a tensor. values: float64 [rows, columns], at `part` of the whole."""

    rank: int
    part: DumpedPart
    values: np.ndarray

    def slice_of(self, whole: np.ndarray) -> np.ndarray:
        """Return these elements of a whole table [rows, columns], a view."""
        part, (rows, columns) = self.part, self.values.shape
        return whole[part.row : part.row + part.step * rows : part.step, part.column : part.column + columns]


@dataclass(frozen=True)
class Dumps:
    """The dumps of one step of a run. parts: tensor -> the file and key of every piece."""

    folder: Path
    parts: dict[str, tuple[tuple[Path, str, DumpedPart], ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, sorted."""
        return tuple(sorted(self.parts))

    def pieces(self, name: str) -> list[RankPart]:
        """Every rank's pieces of a tensor of floats, in the order of ranks, replicas as often as they are held."""
        return [RankPart(rank, part, rows[0 : len(rows)]) for rank, part, rows in self.rows(name)]

    def rows(self, name: str) -> list[tuple[int, DumpedPart, DumpedRows]]:
        """`pieces`, with the rank of each, that are read row by row."""
        return [(_rank_of(file), part, DumpedRows(file, key, part.dtype)) for file, key, part in self.parts[name]]

    def table(self, name: str) -> Table:
        """`values`, read row by row if one piece is the whole tensor."""
        if len(self.parts.get(name, ())) == 1:
            [(file, key, part)] = self.parts[name]
            rows = DumpedRows(file, key, part.dtype)
            if math.prod(rows.shape) == math.prod(part.shape):
                return rows
        return self.values(name)

    def values(self, name: str) -> np.ndarray:
        """Return a whole tensor of floats as float64 [rows, columns]. LedgerError: as for `read`."""
        whole = self.read(name)
        return _values(whole.bits, whole.dtype)

    def read(self, name: str) -> Dumped:
        """Assemble a tensor from the ranks' pieces; the lowest rank's counts. LedgerError: it is not whole."""
        if name not in self.parts:
            raise LedgerError(f"{self.folder} has no {name}; it has {', '.join(self.names) or 'none'}")
        whole: dict[tuple[str, tuple[int, ...]], list[tuple[DumpedPart, np.ndarray]]] = {}
        for file, key, part in self.parts[name]:
            with _opened(file) as stream:
                whole.setdefault((part.dtype, part.shape), []).append((part, stream.get_tensor(key)))
        if len(whole) > 1:
            raise LedgerError(f"{self.folder}: the ranks do not agree on dtype and shape of {name}")
        [((dtype, shape), pieces)] = whole.items()
        bits = _assembled(pieces, math.prod(shape))
        if bits is None:
            raise LedgerError(f"{self.folder}: the pieces of {name} are not the whole of its shape {list(shape)}")
        return Dumped(dtype, shape, bits)


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of a step's dumps."""
    return run / "dumps" / f"step-{step:07d}"


def file_of(run: Path, step: int, rank: int) -> Path:
    """Return the file of a rank's dumps of a step."""
    return folder_of(run, step) / f"rank-{rank}.safetensors"


def _rank_of(file: Path) -> int:
    return int(file.stem.removeprefix("rank-"))


def steps(run: Path) -> list[int]:
    """Return the steps with dumps, in order."""
    return sorted(int(f.name.removeprefix("step-")) for f in (run / "dumps").glob("step-*") if f.is_dir())


def read_step(run: Path, step: int) -> Dumps:
    """Return the dumps of a step. LedgerError, naming the file: there are none, or a file is missing or damaged."""
    files = sorted(folder_of(run, step).glob("rank-*.safetensors"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise LedgerError(f"{run} has no dumps of step {step}; they need ledger.trace={step}:{step} ledger.dump=[NAME]")
    parts: dict[str, list[tuple[Path, str, DumpedPart]]] = {}
    ranks = 0
    for file in files:
        written, described = _described(file)
        ranks = max(ranks, written)
        for key, part in described.items():
            parts.setdefault(part.name, []).append((file, key, part))
    missing = [file for rank in range(ranks) if not (file := file_of(run, step, rank)).exists()]
    if missing:
        raise LedgerError(f"{missing[0]} is missing: {len(files)} of {ranks} ranks wrote their dumps of step {step}")
    return Dumps(folder_of(run, step), {name: tuple(pieces) for name, pieces in parts.items()})


def distance(a: Dumped, b: Dumped) -> Distance:
    """Return the distance between two tensors. LedgerError: their dtypes or shapes differ."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise LedgerError(f"no distance between {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    in_a, in_b = a.bits.reshape(-1), b.bits.reshape(-1)
    where = np.flatnonzero(in_a != in_b)
    if not len(where):
        return Distance(in_a.size, 0, None, None, 0, None)
    first = tuple(int(i) for i in np.unravel_index(where[0], a.shape))
    in_a, in_b = in_a[where], in_b[where]
    number = ~(_is_nan(in_a, a.dtype) | _is_nan(in_b, a.dtype))
    nans = int(len(where) - number.sum())
    in_a, in_b = in_a[number], in_b[number]
    if a.dtype not in _FRACTIONS or not len(in_a):
        return Distance(a.bits.size, len(where), None, None, nans, first)
    ranks = _rank(in_a), _rank(in_b)
    ulp = int((np.maximum(*ranks) - np.minimum(*ranks)).max())
    with np.errstate(over="ignore"):
        largest = float(np.abs(_values(in_a, a.dtype) - _values(in_b, a.dtype)).max())
    return Distance(a.bits.size, len(where), ulp, largest, nans, first)


# dtype -> bits of the fraction; the remaining bits are the sign and the exponent.
_FRACTIONS = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}
# dtype -> the unsigned integers of its width, as safetensors names them.
_BITS = {"float64": ("U64",), "float32": ("U32",), "bfloat16": ("U16",), "float16": ("U16",)}


def _is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in _FRACTIONS:
        return np.zeros(bits.shape, dtype=bool)
    width = 8 * bits.itemsize
    infinity = (1 << (width - 1)) - (1 << _FRACTIONS[dtype])
    return bits & bits.dtype.type((1 << (width - 1)) - 1) > infinity


def _rank(bits: np.ndarray) -> np.ndarray:
    """Map the unsigned patterns to integers in the order of the floats: … -1, -0.0, 0.0, 1 …"""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return bits.astype(np.float64)
    if dtype == "bfloat16":  # the upper half of a float32
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(dtype).astype(np.float64)


def _assembled(pieces: Sequence[tuple[DumpedPart, np.ndarray]], total: int) -> np.ndarray | None:
    """Return the whole table. If pieces overlap, the first counts. None: the pieces do not cover every element."""
    rows = max(part.row + part.step * (len(bits) - 1) + 1 for part, bits in pieces)
    columns = max(part.column + bits.shape[1] for part, bits in pieces)
    if min(rows, columns) < 0 or rows * columns != total or sum(bits.size for _, bits in pieces) < total:
        return None
    if len({bits.dtype for _, bits in pieces}) > 1:
        return None
    table = np.zeros((rows, columns), dtype=pieces[0][1].dtype)
    held = np.zeros((rows, columns), dtype=bool)
    for part, bits in reversed(pieces):
        place = (
            slice(part.row, part.row + part.step * len(bits), part.step),
            slice(part.column, part.column + bits.shape[1]),
        )
        table[place], held[place] = bits, True
    return table if held.all() else None


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="np")


def _described(file: Path) -> tuple[int, dict[str, DumpedPart]]:
    """Return how many ranks wrote files, and the pieces in this one. LedgerError: it is unreadable or no dump."""
    from safetensors import SafetensorError

    try:
        with file.open("rb") as start:
            if int.from_bytes(start.read(8), "little") > LARGEST_HEADER:
                raise ValueError("its header is larger than a dump's")
        with _opened(file) as stream:
            metadata, keys = stream.metadata() or {}, set(stream.keys())
            held = {key: (view.get_dtype(), view.get_shape()) for key in keys for view in (stream.get_slice(key),)}
        ranks = checked(_Ranks, parse_json(metadata.pop(RANKS, "null").encode()))
        if set(metadata) != keys:
            raise ValueError("its metadata describes other tensors")
        parts = {key: _part(key, text, *held[key]) for key, text in metadata.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise LedgerError(f"{file} is not a whole dump: {reason(error)}") from error
    # Restore the order of writing, which the metadata's dictionary does not keep.
    return ranks, {key: parts[key] for key in sorted(parts, key=int)}


def _part(key: str, text: str, kind: str, size: Sequence[int]) -> DumpedPart:
    """Return a piece's description. kind, size: dtype and shape of its bits. ValueError: it is none."""
    if not _KEY.fullmatch(key):
        raise ValueError("its metadata describes a tensor that has no number")
    part = checked(DumpedPart, parse_json(text.encode()))
    if kind not in _BITS.get(part.dtype, ("U8", "U16", "U32", "U64")) or len(size) != 2:
        raise ValueError(f"tensor {key} is not the bits of rows and columns")
    return part
