# SPDX-License-Identifier: Apache-2.0
"""What `tpi train` would do, and what it did."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, override

from rich.text import Text

from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.launch import resume
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sizing.memory import estimate
from tp_invariant_recipes.text import plural


@dataclass(frozen=True)
class PlanResult(Result):
    """A run that passed every check, for `--dry-run`."""

    plan: Plan

    @property
    @override
    def exit_status(self) -> int:
        return 0

    @override
    def lines(self) -> Iterator[str | Text]:
        yield from start_lines(self.plan)
        if self.plan.completed:
            return
        if self.plan.data_missing:
            yield "its text would be prepared first"
        yield from memory_lines(self.plan.composed)
        yield "every check passed, those of Megatron-Bridge as well; nothing is written"

    @override
    def as_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": plan.composed.model,
            "run": str(plan.run_dir.path),
            "device": plan.device,
            "layout": plan.layout.as_dict(),
            "ranks": plan.layout.world,
            "numerics": plan.config.numerics.mode,
            "start": plan.start,
            "of": plan.steps,
            "data_missing": plan.data_missing,
            "memory": available_memory.as_dict(estimate(plan.composed.config)),
        }


def start_lines(plan: Plan) -> Iterator[str | Text]:
    """Return what a run says before it starts."""
    if plan.completed:
        yield resume.completed_text(plan)
        return
    resumed = f", from step {plan.start}" if plan.start else ""
    ranks, steps = plural(plan.layout.world, f"{plan.device} rank"), plural(plan.steps, "step")
    model = Text(plan.composed.model, style="bold")
    yield model + Text(f" on {ranks}, {steps}{resumed}, numerics={plan.config.numerics.mode}", style="not bold")
    if plan.composed.graphs and plan.device == "gpu":
        yield f"CUDA graphs {plan.composed.graphs} (cuda_graph=auto)"
    if other := low_precision.remark(plan.config):
        yield other
    if known := "; ".join(map(str, faults.known(plan.config))):
        yield Text(f"warning: known faults of Megatron: {known}", style="yellow")
    if adjusted := plan.config.recipe.adjusted:
        yield "adjusted, numerics.adjust=false refuses it:"
        yield from (f"  {line}" for line in adjusted)
    save = plan.config.section("checkpoint")["save_interval"]
    every = "step" if save == 1 else f"{save} steps"
    saved = f"every {every} and on SIGTERM" if save else "on SIGTERM only (save=N: every N steps)"
    if plan.text:
        yield f"text {plan.text}"
    yield f"run directory {plan.run_dir.path}; checkpoints {saved}"
    if plan.remark:
        yield plan.remark


def memory_lines(composed: Composed) -> Iterator[str]:
    """Return the memory of the fullest rank, part by part."""
    yield "memory of the fullest rank, about:"
    yield from (f"  {line}" for line in available_memory.table(estimate(composed.config)))
