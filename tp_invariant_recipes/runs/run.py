# SPDX-License-Identifier: Apache-2.0
"""A run as its directory shows it: what `tpi train` says at its end, and what a program reads."""

import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, override

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.view import Ledger
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs import checkpoints, overview
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.text import plural


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
        last, not_finite, diverged = None, [], None
        for last in streamed(run_dir.ledger).steps if run_dir.ledger.exists() else ():
            not_finite += [] if _finite(last.loss) and _finite(last.grad_norm) else [last.step]
            diverged = last.step if last.diverged and diverged is None else diverged
        saved = checkpoints.finished(run_dir.checkpoints)
        self.state, self.why, self.of = row.state, row.why, row.last.to_step or 0
        self.steps = last.step if last else 0
        self.loss = bits_float(last.loss) if last and last.loss else None
        self.grad_norm = bits_float(last.grad_norm) if last and last.grad_norm else None
        self.checkpoint = saved[-1].path if saved else None
        self.not_finite, self.diverged = tuple(not_finite), diverged

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
                f"warning: the loss or gradient norm is NaN or infinite at {plural(len(self.not_finite), 'step')}, "
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
