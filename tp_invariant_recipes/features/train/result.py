"""What `tpi train` would do, and what it did."""

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, override

from rich.text import Text

from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch import resume
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.view import Ledger
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


class Run(Result):
    """A run as its directory shows it when it is opened. It stands wherever the path of a run does.

    Attributes:
        path: The run directory.
        state: "completed", "stopped", "failed", "killed", "running" or "not started"; `why` is the reason of a failure.
        steps: The steps in its ledger; `of`: how many were planned.
        loss: The loss of the last step, and `grad_norm` its gradient norm; None: there is none.
        checkpoint: The newest checkpoint that is finished.
        not_finite: The steps whose loss or gradient norm is NaN or infinite.
        diverged: The first step at which replicas of a tensor did not hold the same bits; None: they always did.
    """

    def __init__(self, path: str | os.PathLike[str], *, interrupted: bool = False) -> None:
        """Read a run directory, and train nothing.

        Args:
            path: The run directory.
            interrupted: Whether Ctrl-C has stopped the run in this process.

        Raises:
            TpiError: There is no run, or it is damaged.
        """
        self.path, self.interrupted = Path(path).expanduser(), interrupted
        run_dir, row = RunDir(self.path), overview.row(self.path)
        if row.state == overview.DAMAGED:
            raise RunError(f"{self.path} is not a run directory: {row.why}")
        steps = read(run_dir.ledger).steps if run_dir.ledger.exists() else ()
        last = steps[-1] if steps else None
        saved = checkpoints.finished(run_dir.checkpoints)
        self.state, self.why, self.of = row.state, row.why, row.last.to_step or 0
        self.steps = last.step if last else 0
        self.loss = bits_float(last.loss) if last and last.loss else None
        self.grad_norm = bits_float(last.grad_norm) if last and last.grad_norm else None
        self.checkpoint = saved[-1].path if saved else None
        self.not_finite = tuple(step.step for step in steps if not all(map(_finite, (step.loss, step.grad_norm))))
        self.diverged = next((step.step for step in steps if step.diverged), None)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def ledger(self) -> Ledger:
        """The run's ledger. Raises TpiError: there is none yet."""
        return Ledger.open(self.path)

    @property
    @override
    def exit_status(self) -> int:
        """0: completed, or stopped to be continued. 2: it failed, or has not ended. 130: Ctrl-C stopped it."""
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
                f"weights rounded: ranks have diverged; {self.path / 'ledger.jsonl'} lists the tensors and the ranks "
                'of that step under "diverged"'
            )
        if self.state == overview.STOPPED:
            yield f"continue with: {shlex.join(['tpi', 'train', '--resume', str(self.path)])}"
        yield from overview.place_lines(RunDir(self.path))

    @override
    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "outcome": self.state,
            "steps": self.steps,
            "of": self.of,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "not_finite": self.not_finite,
            "diverged": self.diverged,
            **overview.places(RunDir(self.path)),
        }
