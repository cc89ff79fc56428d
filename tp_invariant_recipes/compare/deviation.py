"""How far a run's tensors are from a reference's, in units of what rounding moves there.

    unit    = RMS of (dithered reference - reference), over the dithered runs; at least FLOOR · RMS of the reference
    factor  = RMS of (run - reference) / unit

A rank's part of a tensor has its own factor, and the largest counts. So a part that one rank alone has wrong is not
diluted. A row counts by itself where it is beyond ROW times as far: a lost token is one row of thousands. A gradient
norm must also agree with the recorded gradients.

ledger/dumps.py says what the rows and columns of a tensor are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tp_invariant_recipes.compare.error_shape import rms, shape_of
from tp_invariant_recipes.errors import LedgerError, RunError
from tp_invariant_recipes.ledger.dumps import GRADIENT_NORM, LOSS_SHARE, Dumps, RankPiece

MARGIN = 4.0  # a factor beyond it is no rounding (docs/audit.md has the largest of right layouts)
ROW = 4.0  # a single row may be so many times as far
FEWEST_COLUMNS = 16  # of a row that is judged by itself
FLOOR = 0.25  # of the spacing of the numbers that the modules return, relative to them
LEAST_OF_NORM = 2.0**-13  # a norm adds millions of squares in fp32, which no dithering moves
FLIPS = 4.0  # so many units may an expert's score be below the score of the one left out
# The spacing of numbers near 1.
SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# In the order of data flow.
KINDS = ("weights", "forward", "backward", "gradients", "norm", "updates")


@dataclass(frozen=True)
class TensorDeviation:
    """A tensor of a step.

    name:   as in the recording: "forward/decoder.layers.0.mlp/output".
    kind:   one of KINDS. module: the module, or the parameter's module.
    factor: see above; infinite where the reference is 0 whatever rounding does, or the run has no number.
    ranks:  the ranks whose part is beyond MARGIN. of: how many ranks have a part.
    shape:  of the error, in words; None: it has none, or there is no error.
    size:   RMS of the error relative to the reference's; None: the reference is 0.
    """

    step: int
    name: str
    kind: str
    module: str
    factor: float
    ranks: tuple[int, ...]
    of: int
    shape: str | None
    size: float | None

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
    """The deviations of a step in the order of data flow, and the names of the tensors that cannot be compared.

    RunError: nothing can be compared.
    """
    spacing = _spacing(step.reference)
    found, left_out = [], []
    for name in in_order(step.reference):
        try:
            found.append(_deviation(step, name, spacing))
        except (LedgerError, KeyError):
            left_out.append(name)
        if (choice := _choice(step, name)) is not None:
            found.append(choice)
    left_out += [name for name in in_order(step.run) if name not in step.reference.parts]
    if not found:
        raise RunError("the run and its reference have no tensor in common")
    return found, left_out


def in_order(dumps: Dumps) -> list[str]:
    """The names in the order of data flow: a rank wrote its own as it executed, and stages follow the ranks."""
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in dumps.parts:
        if (kind := name.partition("/")[0]) in kinds:
            kinds[kind].append(name)
    kinds["gradients"].reverse()  # the last layer's are ready first
    return [name for kind in KINDS for name in kinds[kind]]


def module_of(name: str) -> str:
    """The module that a tensor belongs to."""
    kind, _, rest = name.partition("/")
    if kind in ("forward", "backward"):
        return rest.rpartition("/")[0]
    return "gradient norm" if name == GRADIENT_NORM else rest.rpartition(".")[0]


def _deviation(step: StepDumps, name: str, spacing: float) -> TensorDeviation:
    reference = step.reference.values(name)
    exact = name.startswith("weights/")  # both trainings start from them
    dithered = [] if exact else [one.values(name) - reference for one in step.dithered]
    noise = _mean_square(dithered or [np.zeros_like(reference)])
    pieces = step.run.pieces(name)
    if name.startswith("backward/"):
        share = float(step.reference.values(LOSS_SHARE)[0, 0] / step.run.values(LOSS_SHARE)[0, 0])
        pieces = [replace(piece, values=piece.values * share) for piece in pieces]
    if not _covered(pieces, reference):
        raise LedgerError(f"{name} has other places or another shape")
    least = 0.0 if exact else FLOOR * spacing * rms(reference)
    if name == GRADIENT_NORM:
        least = max(least, LEAST_OF_NORM * rms(reference))
    if name.startswith("updates/"):  # Adam's first updates are ±lr: one sign may turn
        least = max(least, 2 * rms(reference) / math.sqrt(reference.size))
    factors = _by_rank(pieces, reference, noise, least)
    if name == GRADIENT_NORM:
        own, right = _of_its_gradients(step.run), _of_its_gradients(step.reference)
        far = abs(own / right - 1) / LEAST_OF_NORM if own and right else 0.0
        factors = {rank: max(factor, far) for rank, factor in factors.items()}
    worst = max(factors.values())
    ranks = tuple(rank for rank, factor in factors.items() if not factor <= MARGIN)
    size = rms(reference)
    far = max(rms(piece.values - piece.of(reference)) for piece in pieces)
    return TensorDeviation(
        step=step.step,
        name=name,
        kind=name.partition("/")[0],
        module=module_of(name),
        factor=worst,
        ranks=ranks,
        of=len(factors),
        shape=shape_of(pieces, reference, noise, least * MARGIN, ranks) if ranks else None,
        size=far / size if size and math.isfinite(far) else None,
    )


def _by_rank(pieces: Sequence[RankPiece], reference: np.ndarray, noise: np.ndarray, least: float) -> dict[int, float]:
    """Rank -> the factor of all its pieces together, or of one of their rows."""
    factors: dict[int, float] = {}
    for rank in dict.fromkeys(piece.rank for piece in pieces):
        own = [piece for piece in pieces if piece.rank == rank]
        error = np.concatenate([(piece.values - piece.of(reference)).ravel() for piece in own])
        square = np.concatenate([piece.of(noise).ravel() for piece in own])
        rows = [_rows(piece.values - piece.of(reference), piece.of(noise), least) / ROW for piece in own]
        factors[rank] = max(_ratio(rms(error), max(math.sqrt(square.mean()), least)), *rows)
    return factors


def _rows(error: np.ndarray, noise: np.ndarray, least: float) -> float:
    """The largest factor of a single row; 0 where rows are too short to have one."""
    if error.shape[1] < FEWEST_COLUMNS or not error.size:
        return 0.0
    unit = np.sqrt(np.maximum(noise.mean(1), max(noise.mean(), least**2)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.sqrt(np.square(error).mean(1)) / unit
    return float(np.nan_to_num(ratios, nan=0.0 if not error.any() else math.inf, posinf=math.inf).max())


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
    unit = math.sqrt(_mean_square([one.values(scores) - values for one in step.dithered]).mean())
    worse = np.abs((values * (best - chosen)).sum(1))
    other = int((best != chosen).any(1).sum())
    factor = _ratio(float(worse.max()), FLIPS * max(unit, FLOOR * SPACING["bfloat16"] * rms(values)))
    shape = f"{other} of {len(values)} tokens go to other experts" if factor > MARGIN else None
    return TensorDeviation(step.step, f"choices/{module}", "forward", module, factor, (), 1, shape, None)


def _of_its_gradients(run: Dumps) -> float | None:
    """The gradient norm that a run reports, divided by its gradients' norm; None: not all are whole, or all are 0."""
    try:
        squares = [np.square(run.values(name)).sum() for name in run.parts if name.startswith("gradients/")]
    except LedgerError:
        return None
    norm = math.sqrt(math.fsum(squares))
    return float(run.values(GRADIENT_NORM)[0, 0]) / norm if norm else None


def _covered(pieces: Sequence[RankPiece], reference: np.ndarray) -> bool:
    """Whether every piece lies in a whole of this size, and together they may be all of it."""
    inside = all(piece.of(reference).shape == piece.values.shape for piece in pieces)
    rows = {n for p in pieces for n in range(p.part.row, p.part.row + p.part.step * len(p.values), p.part.step)}
    return inside and len(rows) == len(reference)


def _mean_square(errors: Iterable[np.ndarray]) -> np.ndarray:
    return np.mean([np.square(error) for error in errors], axis=0)


def _ratio(error: float, unit: float) -> float:
    if error == 0:
        return 0.0
    return error / unit if unit and math.isfinite(error) else math.inf


def _spacing(reference: Dumps) -> float:
    """The spacing of the coarsest numbers that modules return."""
    dtypes = {
        part.dtype for name in reference.parts if name.startswith("forward/") for _, _, part in reference.parts[name]
    }
    return max((SPACING[dtype] for dtype in dtypes if dtype in SPACING), default=SPACING["float32"])


def first_beyond(found: Sequence[TensorDeviation]) -> TensorDeviation | None:
    """The first tensor in the order of data flow that is no rounding."""
    return next((one for one in found if one.beyond), None)


def by_module(found: Sequence[TensorDeviation]) -> Mapping[str, list[TensorDeviation]]:
    """Module -> its tensors, in the order of data flow."""
    modules: dict[str, list[TensorDeviation]] = {one.module: [] for one in found if one.kind == "forward"}
    for one in found:
        modules.setdefault(one.module, []).append(one)
    return modules
