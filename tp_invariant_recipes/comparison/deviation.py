# SPDX-License-Identifier: Apache-2.0
"""How far a run's tensors are from a reference's, in units of what rounding moves there.

    unit    = RMS of (dithered reference - reference), over the dithered runs; at least FLOOR · RMS of the reference
    factor  = RMS of (run - reference) / unit

A rank's part of a tensor has its own factor, and the largest counts. So a part that one rank alone has wrong is not
diluted. A row counts by itself where it is beyond ROW times as far: a lost token is one row of thousands. A gradient
norm must also agree with the recorded gradients.

ledger/dumps.py says what the rows and columns of a tensor are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tp_invariant_recipes.comparison import reported_norm
from tp_invariant_recipes.comparison.reported_norm import blocks
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.ledger.dumps import GRADIENT_NORM, LOSS_SHARE, DumpedPart, Dumps, RankPart

SAMPLED = 512  # rows of a piece that are looked for elsewhere
CLOSE = 0.03  # what is left of an error may be so large, relative to the tensor, where its shape explains it
NAMED = {2.0: "added twice", 0.5: "half is missing", -1.0: "the sign"}


def shape_of(
    pieces: Sequence[RankPart], reference: np.ndarray, noise: float, allowed: float, wrong: Sequence[int]
) -> str | None:
    """Return the shape of a tensor's error in words; None: none is known.

    reference: the right tensor [rows, columns]. noise: the mean square of what rounding does to it.
    allowed:   RMS that may be left. wrong: the ranks whose parts are wrong.
    """
    held = [piece for piece in pieces if piece.rank in wrong]
    others = sorted({piece.rank for piece in pieces} - set(wrong))
    values = np.concatenate([piece.values.ravel() for piece in held])
    expected = np.concatenate([piece.slice_of(reference).ravel() for piece in held])
    allowed = max(allowed, CLOSE * rms(expected), 4 * math.sqrt(noise))
    where = f", right on ranks {', '.join(map(str, others))}" if others else ""
    if not np.isfinite(values).all():
        return f"not finite numbers{where}"
    if not values.any():
        return f"zero{where}"
    if not expected.any():
        return f"not zero, as in the reference{where}"
    ratio = float(values @ expected / (expected @ expected))
    if rms(values - ratio * expected) <= abs(ratio) * allowed:
        return f"{_ratio_words(ratio, len({piece.rank for piece in pieces}))}{where}"
    return _parts(pieces, reference, allowed) or _moved(held, reference, allowed) or _zero_rows(held, reference, where)


def _ratio_words(ratio: float, ranks: int) -> str:
    names = NAMED | {1 / n: f"1/{n}" for n in range(3, 65)} | {float(n): f"added {n} times" for n in range(3, 65)}
    near = min(names, key=lambda value: abs(ratio / value - 1))
    meaning = f" ({names[near]})" if abs(ratio / near - 1) < CLOSE else ""
    return f"constant ratio {ratio:.3g}{meaning}"


def _parts(pieces: Sequence[RankPart], reference: np.ndarray, allowed: float) -> str | None:
    """Replicas that differ and whose sum, or mean, is the right tensor."""
    places: dict[tuple[int, int, tuple[int, ...]], list[RankPart]] = {}
    for piece in pieces:
        places.setdefault((piece.part.row, piece.part.column, piece.values.shape), []).append(piece)
    groups = list(places.values())
    ranks = len(groups[0])
    if ranks < 2 or any(len(group) != ranks for group in groups):
        return None
    expected = np.concatenate([group[0].slice_of(reference).ravel() for group in groups])
    total = np.concatenate([np.sum([piece.values for piece in group], axis=0).ravel() for group in groups])
    for whole, words in ((total, "sum"), (total / ranks, "mean")):
        if rms(whole - expected) <= allowed:
            return f"each rank has a partial result: the {words} over {ranks} ranks is right"
    return None


def _moved(held: Sequence[RankPart], reference: np.ndarray, allowed: float) -> str | None:
    """Rows that are right in another place, or a transposed table."""
    square = all(piece.values.shape == reference.shape == reference.T.shape for piece in held)
    if square and all(rms(piece.values - reference.T) <= allowed for piece in held):
        return "transposed"
    if reference.shape[1] < 8:
        return None
    shifts = set()
    for piece in held:
        columns = reference[:, piece.part.column : piece.part.column + piece.values.shape[1]]
        places = set()
        for row in range(0, len(piece.values), max(1, len(piece.values) // SAMPLED)):
            far = np.square(columns - piece.values[row]).mean(1)
            nearest = int(far.argmin())
            if math.sqrt(far[nearest]) > allowed:
                return None
            if nearest in places:  # two rows in one place: no order of the right rows
                return None
            places.add(nearest)
            shifts.add(nearest - (piece.part.row + row * piece.part.step))
    if not shifts - {0}:
        return None
    height = len(reference)
    around = {(shift + height // 2) % height - height // 2 for shift in shifts}  # the ends may be joined
    return f"rows shifted by {around.pop()}" if len(around) == 1 else "rows in another order"


def _zero_rows(held: Sequence[RankPart], reference: np.ndarray, where: str) -> str | None:
    """Rows that are missing, or the only ones that are wrong."""
    rows = sum(len(piece.values) for piece in held)
    zero = sum(int((~piece.values.any(1) & piece.slice_of(reference).any(1)).sum()) for piece in held)
    if zero:
        return f"{zero} of {rows} rows are zero{where}"
    return f"wrong on some ranks alone{where}" if where else None


def rms(x: np.ndarray) -> float:
    """Root of the mean square; 0 of nothing."""
    return math.sqrt(float(np.square(x).mean())) if x.size else 0.0


MARGIN = 4.0  # a factor beyond it is no rounding (docs/audit.md has the largest of right layouts)
ROW = 4.0  # a single row may be so many times as far
FEWEST_COLUMNS = 16  # of a row that is judged by itself
FLOOR = 0.25  # of the spacing of the numbers that the modules return, relative to them
LEAST_OF_NUMBER = 2.0**-13  # a norm or a loss adds millions of numbers in fp32, which no dithering moves
FEW = 256  # elements: rounding moves fewer by too much to tell
FLIPS = 4.0  # so many units may an expert's score be below the score of the one left out
# The spacing of numbers near 1.
SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# In the order of data flow.
KINDS = ("weights", "forward", "backward", "gradients", "norm", "updates", "reports")


@dataclass(frozen=True)
class TensorDeviation:
    """A tensor of a step.

    name:   as in the recording: "forward/decoder.layers.0.mlp/output".
    kind:   one of KINDS. module: the module, or the parameter's module.
    factor: see above; infinite where the reference is 0 whatever rounding does, or the run has no number.
    ranks:  the ranks whose part is beyond MARGIN. all_ranks: how many ranks have a part.
    shape:  of the error, in words; None: it has none, or there is no error.
    size:   RMS of the error relative to the reference's; None: the reference is 0.
    rms:    of the reference. dims: the shape of the whole tensor.
    sees:   the smallest such RMS that is outside rounding-error tolerance; None: likewise, or a tensor has fewer than
    FEW elements.
    """

    step: int
    name: str
    kind: str
    module: str
    factor: float
    ranks: tuple[int, ...]
    all_ranks: int
    shape: str | None
    size: float | None
    sees: float | None = None
    rms: float = 0.0
    dims: tuple[int, ...] = ()

    @property
    def beyond(self) -> bool:
        """Whether it is no rounding."""
        return not self.factor <= MARGIN


@dataclass(frozen=True)
class StepDumps:
    """What a step's recordings hold. dithered: of the repetitions of the reference."""

    step: int
    run: Dumps
    reference: Dumps
    dithered: tuple[Dumps, ...]


def judge(step: StepDumps) -> tuple[list[TensorDeviation], list[str]]:
    """Return the deviations of a step in the order of data flow, and the names of the tensors that cannot be compared.

    RunError: nothing can be compared.
    """
    spacing = _spacing(step.reference)
    deviations, omitted = [], []
    for name in in_order(step.reference):
        try:
            deviations.append(_deviation(step, name, spacing))
        except (LedgerError, KeyError):
            omitted.append(name)
        if (choice := _choice(step, name)) is not None:
            deviations.append(choice)
    omitted += [name for name in in_order(step.run) if name not in step.reference.parts]
    if not deviations:
        raise RunError("the run and its reference have no tensor in common")
    return deviations, omitted


def in_order(dumps: Dumps) -> list[str]:
    """Return the names in the order of data flow: a rank wrote its own as it executed, and stages follow the ranks."""
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in dumps.parts:
        if (kind := name.partition("/")[0]) in kinds:
            kinds[kind].append(name)
    kinds["gradients"].reverse()  # the last layer's are ready first
    return [name for kind in KINDS for name in kinds[kind]]


def module_of(name: str) -> str:
    """Return the module that a tensor belongs to."""
    kind, _, rest = name.partition("/")
    if kind in ("forward", "backward"):
        return rest.rpartition("/")[0]
    if kind == "reports":
        return rest
    return "gradient norm" if name == GRADIENT_NORM else rest.rpartition(".")[0]


def _deviation(step: StepDumps, name: str, spacing: float) -> TensorDeviation:
    exact = name.startswith("weights/")  # both trainings start from them
    share = 1.0
    if name.startswith("backward/"):
        share = float(step.reference.values(LOSS_SHARE)[0, 0] / step.run.values(LOSS_SHARE)[0, 0])
    far = _distances(step, name, () if exact else step.dithered, share)
    least = 0.0 if exact else _least(name, far, spacing)
    ranks_of = dict.fromkeys(error.rank for error in far.errors)
    factors = {rank: factor_of([error for error in far.errors if error.rank == rank], least) for rank in ranks_of}
    counted = None
    if name == GRADIENT_NORM:
        distance, counted = reported_norm.distance(step.run, step.reference)
        factors = {rank: max(factor, distance) for rank, factor in factors.items()}
    ranks = tuple(rank for rank, factor in factors.items() if not factor <= MARGIN)
    shape = counted if ranks else None
    if ranks and shape is None:
        pieces = [replace(piece, values=piece.values * share) for piece in step.run.pieces(name)]
        shape = shape_of(pieces, step.reference.values(name), far.noise, least * MARGIN, ranks)
    largest = max(math.sqrt(error.squares.sum() / max(1, error.elements)) for error in far.errors)
    return TensorDeviation(
        step=step.step,
        name=name,
        kind=name.partition("/")[0],
        module=module_of(name),
        factor=max(factors.values()),
        ranks=ranks,
        all_ranks=len(factors),
        shape=shape,
        size=(largest / far.size if far.size and math.isfinite(largest) else None),
        rms=far.size,
        dims=step.reference.parts[name][0][2].shape,
        sees=MARGIN * max(math.sqrt(far.noise), least) / far.size if far.size and far.elements >= FEW else None,
    )


def _least(name: str, far: "_Distances", spacing: float) -> float:
    """Return the RMS that is no error of a tensor, whatever rounding moves."""
    least = FLOOR * spacing * far.size
    if far.elements == 1:
        least = max(least, LEAST_OF_NUMBER * far.size)
    if name.startswith("updates/"):  # Adam's first updates are ±lr: one sign may turn
        least = max(least, 2 * far.size / math.sqrt(far.elements))
    return least


@dataclass(frozen=True)
class PieceError:
    """Of a rank's piece, for each of its rows the sum of squares of its error, and of what rounding moves there."""

    rank: int
    columns: int
    squares: np.ndarray
    noise: np.ndarray

    @property
    def elements(self) -> int:
        """Of the piece."""
        return len(self.squares) * self.columns

    def of_rows(self, least: float) -> np.ndarray:
        """Return the factor of each row by itself."""
        noise = self.noise / self.columns
        unit = np.sqrt(np.maximum(noise, max(noise.mean(), least**2)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.sqrt(self.squares / self.columns) / unit
        return np.nan_to_num(ratios, nan=math.inf if self.squares.any() else 0.0, posinf=math.inf)


def factor_of(pieces: Sequence[PieceError], least: float) -> float:
    """Return the factor of pieces together, or of one of their rows of FEWEST_COLUMNS. least: RMS that is no error."""
    elements = max(1, sum(piece.elements for piece in pieces))
    error, noise = (
        math.sqrt(sum(getattr(piece, sums).sum() for piece in pieces) / elements) for sums in ("squares", "noise")
    )
    judged = (piece for piece in pieces if piece.columns >= FEWEST_COLUMNS and piece.elements)
    return max(_ratio(error, max(noise, least)), *(float(piece.of_rows(least).max()) / ROW for piece in judged), 0.0)


@dataclass(frozen=True)
class _Distances:
    """Of a whole tensor. size: RMS of the reference. noise: mean square of what rounding moves. errors: by piece."""

    elements: int
    size: float
    noise: float
    errors: list[PieceError]


def _distances(step: StepDumps, name: str, dithered: Sequence[Dumps], share: float) -> _Distances:
    """Read the tensor once, some rows at a time, so that memory does not grow with it.

    share: what the run's values are multiplied by. LedgerError: the run's pieces lie elsewhere.
    """
    reference, moved = step.reference.table(name), [dumps.table(name) for dumps in dithered]
    pieces = step.run.rows(name)
    (height, width), sizes = reference.shape, [table.shape for _, _, table in pieces]
    if not _covered([part for _, part, _ in pieces], sizes, (height, width)):
        raise LedgerError(f"{name} has other offsets or another shape")
    errors = [PieceError(rank, table.shape[1], *np.zeros((2, len(table)))) for rank, _, table in pieces]
    square = noise = 0.0
    for rows in blocks(height, width):
        exact = reference[rows]
        near = np.zeros_like(exact)
        for dither in moved:
            near += np.square(dither[rows] - exact) / len(moved)
        square, noise = square + float(np.square(exact).sum()), noise + float(near.sum())
        for (_, part, table), error in zip(pieces, errors, strict=True):
            length = len(table)
            first, last = (min(length, max(0, -(-(end - part.row) // part.step))) for end in (rows.start, rows.stop))
            begin = part.row + part.step * first - rows.start
            own, place = slice(first, last), slice(begin, begin + part.step * (last - first), part.step)
            if own.start < own.stop:
                columns = slice(part.column, part.column + error.columns)
                difference = table[own] * share - exact[place, columns]
                error.squares[own], error.noise[own] = np.square(difference).sum(1), near[place, columns].sum(1)
    elements = height * width
    return _Distances(elements, math.sqrt(square / max(1, elements)), noise / max(1, elements), errors)


def _choice(step: StepDumps, name: str) -> TensorDeviation | None:
    """How much worse, in the reference's scores, the experts are that the run chose; None: the tensor is no choice."""
    module = module_of(name)
    scores, own = f"choices/{module}/scores", f"choices/{module}/own"
    if name != f"forward/{module}/output.1" or scores not in step.reference.parts:
        return None
    values, best = step.reference.values(scores), step.reference.values(own)
    try:
        chosen = step.run.values(name)
    except LedgerError:
        return None
    unit = math.sqrt(np.mean([np.square(dumps.values(scores) - values) for dumps in step.dithered]))
    worse = np.abs((values * (best - chosen)).sum(1))
    other = int((best != chosen).any(1).sum())
    factor = _ratio(float(worse.max()), FLIPS * max(unit, FLOOR * SPACING["bfloat16"] * rms(values)))
    shape = f"{other} of {len(values)} tokens go to other experts" if factor > MARGIN else None
    return TensorDeviation(step.step, f"choices/{module}", "forward", module, factor, (), 1, shape, None)


def _covered(parts: Sequence[DumpedPart], sizes: Sequence[tuple[int, int]], whole: tuple[int, int]) -> bool:
    """Whether every piece lies in a whole of this size, and together they may be all of it."""
    rows: set[int] = set()
    for part, (height, width) in zip(parts, sizes, strict=True):
        own = range(part.row, part.row + part.step * height, part.step)
        if (own and own[-1] >= whole[0]) or part.column + width > whole[1]:
            return False
        rows.update(own)
    return len(rows) == whole[0]


def _ratio(error: float, unit: float) -> float:
    if error == 0:
        return 0.0
    return error / unit if unit and math.isfinite(error) else math.inf


def _spacing(reference: Dumps) -> float:
    """Return the spacing of the coarsest numbers that modules return."""
    dtypes = {
        part.dtype for name in reference.parts if name.startswith("forward/") for _, _, part in reference.parts[name]
    }
    return max((SPACING[dtype] for dtype in dtypes if dtype in SPACING), default=SPACING["float32"])


def blind_spots(deviations: Sequence[TensorDeviation]) -> dict[str, TensorDeviation]:
    """Kind -> the tensor of which an error must be the largest to be seen."""
    seen = [tensor for tensor in deviations if tensor.sees is not None]
    kinds = dict.fromkeys(tensor.kind for tensor in seen)
    return {kind: max((t for t in seen if t.kind == kind), key=lambda t: t.sees or 0.0) for kind in kinds}


def by_module(deviations: Sequence[TensorDeviation]) -> Mapping[str, list[TensorDeviation]]:
    """Return module -> its tensors, in the order of data flow."""
    modules: dict[str, list[TensorDeviation]] = {
        deviation.module: [] for deviation in deviations if deviation.kind == "forward"
    }
    for tensor in deviations:
        modules.setdefault(tensor.module, []).append(tensor)
    return modules
