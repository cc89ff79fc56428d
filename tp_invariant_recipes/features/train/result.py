"""What `tpi train` would do, and what it did."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from rich.text import Text

from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.launch import resume
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs import checkpoints, overview
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.sizing import room
from tp_invariant_recipes.sizing.memory import estimate
from tp_invariant_recipes.text import counted


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
            "memory": room.as_dict(estimate(plan.composed.config)),
        }


def start_lines(plan: Plan) -> Iterator[str | Text]:
    """Return what a run says before it starts."""
    if plan.completed:
        yield resume.completed_text(plan)
        return
    resumed = f", from step {plan.start}" if plan.start else ""
    ranks, steps = counted(plan.layout.world, f"{plan.device} rank"), counted(plan.steps, "step")
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
    yield from (f"  {line}" for line in room.table(estimate(composed.config)))


def _finite(bits: str | None) -> bool:
    return bits is None or math.isfinite(bits_float(bits))


@dataclass(frozen=True)
class TrainResult(Result):
    """A run as its directory shows it.

    state: "completed", "stopped", "failed" … (runs/overview.py). why: of a failure.
    loss, grad_norm: of the last step; None: there is none. of: how many steps were planned.
    checkpoint: the newest that is finished. interrupted: whether Ctrl-C stopped the run.
    not_finite: the steps whose loss or gradient norm is NaN or infinite.
    diverged:   the first step at which replicas of a tensor did not hold the same bits; None: they always did.
    """

    run: Path
    state: str
    why: str | None
    steps: int
    of: int
    loss: float | None
    grad_norm: float | None
    checkpoint: Path | None
    not_finite: tuple[int, ...]
    diverged: int | None
    interrupted: bool = False

    @classmethod
    def of_run(cls, run_dir: RunDir, *, interrupted: bool = False) -> "TrainResult":
        """Read the run directory. Raises LedgerError: its ledger is damaged."""
        row = overview.row(run_dir.path)
        steps = read(run_dir.ledger).steps if run_dir.ledger.exists() else ()
        last = steps[-1] if steps else None
        saved = checkpoints.finished(run_dir.checkpoints)
        return cls(
            run=run_dir.path,
            state=row.state,
            why=row.why,
            steps=last.step if last else 0,
            of=row.last.to_step or 0,
            loss=bits_float(last.loss) if last and last.loss else None,
            grad_norm=bits_float(last.grad_norm) if last and last.grad_norm else None,
            checkpoint=saved[-1].path if saved else None,
            not_finite=tuple(step.step for step in steps if not all(map(_finite, (step.loss, step.grad_norm)))),
            diverged=next((step.step for step in steps if step.diverged), None),
            interrupted=interrupted,
        )

    @property
    @override
    def exit_status(self) -> int:
        return 130 if self.interrupted else 0 if self.state in (overview.COMPLETED, overview.STOPPED) else 2

    @override
    def lines(self) -> Iterator[str]:
        figures = "" if self.loss is None else f": loss {self.loss:.4f}, gradient norm {self.grad_norm:.4f}"
        yield f"{self.state} at step {self.steps} of {self.of}{figures}{f': {self.why}' if self.why else ''}"
        if self.not_finite:
            yield (
                f"warning: the loss or gradient norm is NaN or infinite at {counted(len(self.not_finite), 'step')}, "
                f"first at step {self.not_finite[0]}: ddp.check_for_nan_in_grad=true ends a run at such a gradient, "
                "and tpi bisect finds the operation"
            )
        if self.diverged is not None:
            yield (
                f"warning: ranks disagree on a tensor at step {self.diverged}, or weights are not their master "
                f"weights rounded: ranks have diverged; {self.run / 'ledger.jsonl'} lists the tensors and the ranks "
                'of that step under "diverged"'
            )
        if self.state == overview.STOPPED:
            yield f"continue with: {shlex.join(['tpi', 'train', '--resume', str(self.run)])}"
        yield from overview.place_lines(RunDir(self.run))

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "outcome": self.state,
            "steps": self.steps,
            "of": self.of,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "not_finite": self.not_finite,
            "diverged": self.diverged,
            **overview.places(RunDir(self.run)),
        }
