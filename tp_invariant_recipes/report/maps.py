"""The step × parameter map: the steps and parameters at which the digests of two runs differ, and how far dumps do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tp_invariant_recipes.compare.compare import Comparison, ParameterDifference
from tp_invariant_recipes.compare.step_order import FIELDS, parameter_of
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.ledger.digests import group_of, in_order
from tp_invariant_recipes.ledger.dumps import Distance
from tp_invariant_recipes.report.curves import distances

ROWS = 64  # more would be unreadable
COLUMNS = 200


class CellState(IntEnum):
    """The state of a cell's digests, which belong to one or more parameters at one or more steps."""

    NOT_COMPARED = 0  # one of the runs has no such parameter
    IDENTICAL = 1
    PARTLY_DIFFERENT = 2
    DIFFERENT = 3  # all that were compared


@dataclass(frozen=True)
class MapRow:
    """A row: one parameter, a group of them, or several groups in sequence; without parameters, a number."""

    label: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Map:
    """The digests of `kind`, a key of DIGESTED, of two runs.

    rows:     the recorded numbers that differ, such as the loss; then parameters in forward order.
    columns:  (first step, last step) of each column, among the steps at which both runs have digests.
    block:    steps per column.
    states:   uint8 [rows, columns] of CellState.
    ulp:      float64 [rows, columns], the largest distance in ULP, of a number or of dumps; NaN: equal, or no dump.
    compared, differing: numbers of digests.
    parameters_differing, parameters_compared, steps_differing, steps_compared: parameters and steps with at least one
              such digest.
    steps_alone: number of steps at which only one run has digests.
    first:    the first step that differs; None: no step differs.
    """

    kind: str
    rows: tuple[MapRow, ...]
    columns: tuple[tuple[int, int], ...]
    block: int
    states: np.ndarray
    ulp: np.ndarray
    compared: int
    differing: int
    parameters_differing: int
    parameters_compared: int
    steps_differing: int
    steps_compared: int
    steps_alone: int
    first: int | None


def parameter_map(comparison: Comparison, kind: str, dumped: Mapping[tuple[int, str], int] | None = None) -> Map | None:
    """Return the map of two runs. None: they have no digests of `kind` at a common step.

    dumped: (step, parameter) -> largest distance in ULP between the tensors that both runs dumped.
    """
    digested = [run.header.digested(kind) for run in (comparison.a, comparison.b)]
    common = {parameter_of(kind, name) for name in comparison.tensors[kind]}
    steps, alone = _steps(comparison, kind)
    if not common or not steps:
        return None
    rows = _rows(in_order(set[str]().union(*digested)))
    block = max(1, -(-len(steps) // COLUMNS))
    row_of = {name: n for n, row in enumerate(rows) for name in row.parameters}
    column_of = {step: n // block for n, step in enumerate(steps)}
    columns = tuple((steps[n], steps[min(n + block, len(steps)) - 1]) for n in range(0, len(steps), block))
    members = [len(common.intersection(row.parameters)) for row in rows]
    compared = np.outer(members, np.bincount(list(column_of.values())))
    parameters = [difference for difference in comparison.parameters if difference.kind == kind]
    differing = _differing(parameters, row_of, column_of, compared)
    numbers = _numbers(comparison, column_of, len(columns))
    ulp = np.vstack([*numbers.values(), _largest(dumped or {}, row_of, column_of, compared.shape)])
    states = _states(compared, differing)
    of_numbers = np.where(np.isnan(ulp[: len(numbers)]), CellState.IDENTICAL, CellState.DIFFERENT).astype(states.dtype)
    steps_differing = set[int]().union(*(difference.steps for difference in parameters))
    return Map(
        kind=kind,
        rows=(*(MapRow(label, ()) for label in numbers), *rows),
        columns=columns,
        block=block,
        states=np.vstack([of_numbers, states]),
        ulp=ulp,
        compared=int(compared.sum()),
        differing=int(differing.sum()),
        parameters_differing=len(parameters),
        parameters_compared=len(common),
        steps_differing=len(steps_differing),
        steps_compared=len(steps),
        steps_alone=alone,
        first=min(steps_differing, default=None),
    )


def _differing(
    parameters: list[ParameterDifference], row_of: Mapping[str, int], column_of: Mapping[int, int], like: np.ndarray
) -> np.ndarray:
    """Count the digests of each cell that differ. returns: of the shape and dtype of `like`."""
    differing = np.zeros_like(like)
    for difference in parameters:
        for step in difference.steps:
            differing[row_of[difference.name], column_of[step]] += 1
    return differing


def _steps(comparison: Comparison, kind: str) -> tuple[list[int], int]:
    """Return the compared steps at which both runs have digests of `kind`, and at how many only one has."""
    pairs = list(zip(comparison.a.steps, comparison.b.steps, strict=False))[: comparison.steps_compared]
    sides = {a.step: sum(getattr(record, kind) is not None for record in (a, b)) for a, b in pairs}
    return [step for step, has in sides.items() if has == 2], list(sides.values()).count(1)


def _numbers(comparison: Comparison, column_of: Mapping[int, int], width: int) -> dict[str, np.ndarray]:
    """Label of a number that differs at one of the steps -> its largest distances; infinite: only one is a number."""
    numbers = {}
    for field in (field for field in FIELDS if field.is_float):
        ulp = np.full(width, np.nan)
        for step, distance in distances(comparison.a, comparison.b, field.name):
            if step in column_of and distance != 0:
                ulp[column_of[step]] = np.fmax(ulp[column_of[step]], np.inf if distance is None else distance)
        if not np.isnan(ulp).all():
            numbers[field.label] = ulp
    return numbers


def _states(compared: np.ndarray, differing: np.ndarray) -> np.ndarray:
    states = np.full(compared.shape, CellState.NOT_COMPARED, dtype=np.uint8)
    states[compared > 0] = CellState.IDENTICAL
    states[differing > 0] = CellState.PARTLY_DIFFERENT
    states[(differing > 0) & (differing == compared)] = CellState.DIFFERENT
    return states


def _largest(
    dumped: Mapping[tuple[int, str], int],
    row_of: Mapping[str, int],
    column_of: Mapping[int, int],
    shape: tuple[int, ...],
) -> np.ndarray:
    ulp = np.full(shape, np.nan)
    for (step, name), distance in dumped.items():
        if name in row_of and step in column_of:
            cell = row_of[name], column_of[step]
            ulp[cell] = np.fmax(ulp[cell], distance)
    return ulp


def _rows(names: list[str]) -> tuple[MapRow, ...]:
    """One row per parameter; if those are too many, one row per group; if still too many, several groups per row."""
    if len(names) <= ROWS:
        return tuple(MapRow(name, (name,)) for name in names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    size = -(-len(groups) // ROWS)
    labels = list(groups)
    return tuple(_row(labels[n : n + size], groups) for n in range(0, len(labels), size))


def _row(labels: list[str], groups: Mapping[str, Iterable[str]]) -> MapRow:
    members = tuple(name for label in labels for name in groups[label])
    ends = labels[0] if len(labels) == 1 else f"{labels[0]} … {labels[-1]}"
    return MapRow(f"{ends} ({len(members)})", members)


@dataclass(frozen=True)
class Measured:
    """A tensor of both runs' dumps. name: such as "gradients/decoder.layers.3.mlp.linear_fc1.weight"."""

    step: int
    name: str
    distance: Distance


def measure(comparison: Comparison) -> tuple[Measured, ...]:
    """Measure the tensors that both dumped at a compared step. LedgerError: dumps are damaged, or shapes differ."""
    folders = [ledger.run_directory for ledger in (comparison.a, comparison.b)]
    in_a, in_b = (set(dumps.steps(folder)) if folder else set[int]() for folder in folders)
    tensors = []
    for step in sorted(in_a & in_b):
        if step > comparison.steps_compared:
            break
        a, b = (dumps.read_step(folder, step) for folder in folders if folder)
        tensors += [Measured(step, n, dumps.distance(a.read(n), b.read(n))) for n in a.names if n in b.parts]
    return tuple(tensors)


def largest(measured: tuple[Measured, ...], kind: str) -> dict[tuple[int, str], int]:
    """(step, parameter) -> largest distance in ULP, of the tensors of `kind` that differ."""
    own = ((tensor.step, tensor.name.partition("/"), tensor.distance.max_ulp) for tensor in measured)
    return {(step, name): ulp for step, (recorded, _, name), ulp in own if recorded == kind and ulp is not None}
