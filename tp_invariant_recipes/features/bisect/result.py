# SPDX-License-Identifier: Apache-2.0
"""What `tpi bisect` found: the first tensor that differs in two traces of a step, and the verdict about it."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, override

from rich.text import Text

from tp_invariant_recipes.comparison.compare import Comparison, FirstDifference
from tp_invariant_recipes.comparison.explanation import modules_of
from tp_invariant_recipes.comparison.magnitude import DUMPED
from tp_invariant_recipes.comparison.result import comparison_json
from tp_invariant_recipes.comparison.step_order import REPLICAS
from tp_invariant_recipes.comparison.text import verdict_line
from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.bisect.recompute import Arbitration
from tp_invariant_recipes.result import Result

# Kind of the first difference, or name of the field -> the operation that made it, if everything before it matched.
OPERATIONS = {
    "forward": "the forward pass of {module}",
    "backward": "the gradient that {module} sends to its input",
    "loss": "the loss itself",
    "gradients": "the weight gradient of {module}: its product, or the sum over micro-batches and data-parallel ranks",
    "grad_norm": "the sum of the gradient norm",
    "clipped": "the clipping of the gradients, or a change of them before the optimizer reads them",
    "moments": "the update of the optimizer",
    "masters": "the update of the optimizer",
    "weights": "the update of the optimizer",
}


def worth_dumping(placed: Comparison) -> tuple[str, ...]:
    """Get the first differing tensor and its operands: a module's inputs; for a gradient, the inputs of both passes."""
    first = placed.first
    if first is None or first.kind not in DUMPED or " #" in first.name:
        return ()
    if first.kind in ("masters", "weights"):
        return (first.name, first.name.replace(f"{first.kind}/", "gradients/", 1))
    module = module_of(placed)
    if module is None or first.name.rpartition("/")[2].startswith("input"):
        return (first.name,)
    directions = ("forward", "backward") if first.kind == "gradients" else (first.kind,)
    return (first.name, *_traced_inputs(placed, first.step, module, directions))


def _traced_inputs(placed: Comparison, step: int, module: str, directions: Iterable[str]) -> dict[str, None]:
    """Get the inputs of a module that both runs traced with digests at a step, in order."""
    start = tuple(f"{direction}/{module}/input" for direction in directions)
    a, b = (ledger.steps[step - 1].trace or () for ledger in (placed.a, placed.b))
    both = {traced.name for traced in a if traced.digest} & {traced.name for traced in b if traced.digest}
    return dict.fromkeys(traced.name for traced in a if traced.name.startswith(start) and traced.name in both)


def module_of(placed: Comparison) -> str | None:
    """Return the module at which the runs first differ; of a parameter's tensor, the module traced with it."""
    first = placed.first
    if first is None or _kind(first) not in DUMPED:
        return None
    _, _, rest = first.name.partition("/")
    if _kind(first) in ("forward", "backward"):
        return rest.rpartition("/")[0]
    traced = {t.module for t in placed.a.steps[first.step - 1].trace or ()}
    return next(iter(modules_of(rest, traced)), None)


def operation(placed: Comparison) -> str | None:
    """Return the operation that made the first difference. None: one of its operands differs, or is not known."""
    first = placed.first
    if first is None or not first.inputs_matched:
        return None
    words = OPERATIONS.get(_kind(first)) or OPERATIONS.get(first.name)
    return None if words is None else words.format(module=module_of(placed))


def _kind(first: FirstDifference) -> str:
    """Return the kind of the tensor that differs, between runs or between the replicas of one run."""
    return first.name.partition("/")[0] if first.kind == REPLICAS else first.kind


def distances(dumped: Comparison, step: int, names: Sequence[str]) -> dict[str, Any]:
    """Tensor -> the fields of `dumps.Distance`, or `error`, for every dumped tensor."""
    from tp_invariant_recipes.ledger import dumps

    by_tensor: dict[str, Any] = {}
    try:
        dump_a, dump_b = (dumps.read_step(ledger.path.parent, step) for ledger in (dumped.a, dumped.b))
    except LedgerError as error:
        return {name: {"error": str(error)} for name in names}
    for name in names:
        try:
            by_tensor[name] = asdict(dumps.distance(dump_a.read(name), dump_b.read(name)))
        except LedgerError as error:
            by_tensor[name] = {"error": str(error)}
    return by_tensor


SCHEMA = 1


@dataclass(frozen=True)
class NothingToTrain(Result):
    """A comparison that leaves no step to train again."""

    recorded: Comparison

    @property
    @override
    def exit_status(self) -> int:
        return self.recorded.exit_status

    @override
    def lines(self) -> Iterator[str]:
        yield from (verdict_line(self.recorded), "there is no step to train again")

    @override
    def as_json(self) -> dict[str, Any]:
        return {"recorded": comparison_json(self.recorded)}


@dataclass(frozen=True)
class BisectResult(Result):
    """Two runs trained again, as `bisect.json` holds them (docs/bisect.md).

    step:       the first that differs. from_steps: the steps that the runs were trained again from.
    traced:     directories of the runs trained again. repeats: whether each computed its recorded bits again.
    recorded, placed: the comparison of the original runs, and of those trained again.
    module, operation: where they first differ; None: not known.
    dumped:     names of the tensors written at that step. magnitude: of the first, in words. distances: of each.
    same_place: whether the runs with dumps first differ there, too.
    """

    directory: str
    time: str
    runs: tuple[str, ...]
    step: int
    from_steps: tuple[int, ...]
    traced: tuple[str, ...]
    recorded: Comparison
    repeats: tuple[bool, ...]
    words: str
    placed: Comparison
    module: str | None
    operation: str | None
    dumped: tuple[str, ...]
    magnitude: str | None
    distances: Mapping[str, Mapping[str, Any]]
    same_place: bool
    remarks: tuple[str, ...]
    referee: Arbitration | None = None

    @property
    @override
    def exit_status(self) -> int:
        return self.recorded.exit_status

    @override
    def lines(self) -> Iterator[str | Text]:
        yield Text(self.words, style="bold")
        if self.referee:
            yield self.referee.text
        if self.operation:
            yield f"the operation: {self.operation}"
        if self.magnitude:
            yield f"{self.dumped[0]}: {self.magnitude}"
            if equal := [name for name, distance in self.distances.items() if distance.get("differing") == 0]:
                yield f"equal: {', '.join(equal)}"
            yield f"values: {self.directory}/dumped-a/dumps and dumped-b/dumps"
        traced = shlex.join(self.traced)
        yield from (*self.remarks, f"to look further: tpi compare {traced} --all, tpi report {traced}")

    @override
    def as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"schema": SCHEMA, "exit_status": self.exit_status}
        result |= {field.name: getattr(self, field.name) for field in fields(self)}
        result["text"] = result.pop("words")
        result |= {name: comparison_json(result[name]) for name in ("recorded", "placed")}
        referee = result.pop("referee")
        return result | ({"referee": asdict(referee)} if referee else {})
