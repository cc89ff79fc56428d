"""What `tpi bisect` found."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, override

from rich.text import Text

from tp_invariant_recipes.compare.compare import Comparison
from tp_invariant_recipes.compare.result import comparison_json
from tp_invariant_recipes.compare.text import verdict_line
from tp_invariant_recipes.features.check import Refereed
from tp_invariant_recipes.result import Result

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
    dumped:     names of the tensors written at that step. distance, distances: of the first of them, and of each.
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
    distance: Mapping[str, Any] | None
    distances: Mapping[str, Mapping[str, Any]]
    same_place: bool
    remarks: tuple[str, ...]
    referee: Refereed | None = None

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
