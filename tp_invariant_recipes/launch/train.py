"""`tpi train`, once it is planned: check with Bridge, write the run directory, run the ranks."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tp_invariant_recipes.config import container
from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.host.quiet import quiet
from tp_invariant_recipes.launch import local, plan
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import Stop
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs import attempts, checkpoints


def check(planned: Plan) -> None:
    """Build the run's ConfigContainer and let Bridge validate it. Imports Bridge, 10 to 20 s. Raises ConfigError."""
    if planned.here:
        os.environ.update(planned.environment)
    with quiet():
        container.validate(container.build(planned.tree), planned.layout.world, here=planned.here)


def execute(planned: Plan, watch: Callable[[], None], stop: Stop | None = None) -> local.Outcome:
    """Write the run directory and train. Raises RunError when a rank dies.

    watch: called while the ranks live, to show progress. stop: as for `local.run`.
    """
    if planned.run_dir.checkpoints.exists():
        checkpoints.set_aside(planned.run_dir.checkpoints, after=planned.start)
    plan.write(planned)
    try:
        outcome = local.run(planned, watch, stop=stop)
    except TpiError as error:
        with suppress(TpiError):  # a full disk, mostly: then the run's own error says so
            attempts.end(planned.run_dir, "failed", str(error))
        raise
    attempts.end(planned.run_dir, outcome.value)
    return outcome


def summary(planned: Plan, outcome: local.Outcome) -> dict[str, Any]:
    """The summary of a run: its directory, its outcome, the figures of its last step.

    diverged: the first step at which replicas of a tensor did not hold the same bits; None: they always did.
    """
    run_dir = planned.run_dir
    steps = read(run_dir.ledger).steps if run_dir.ledger.exists() else ()
    last = steps[-1] if steps else None
    return {
        "run": str(run_dir.path),
        "outcome": outcome.value,
        "steps": last.step if last else 0,
        "of": planned.steps,
        "loss": bits_float(last.loss) if last and last.loss else None,
        "grad_norm": bits_float(last.grad_norm) if last and last.grad_norm else None,
        "checkpoint": _newest_checkpoint(planned),
        "diverged": next((step.step for step in steps if step.diverged), None),
    }


def _newest_checkpoint(planned: Plan) -> str | None:
    found = checkpoints.finished(planned.run_dir.checkpoints)
    return str(found[-1].path) if found else None
