# SPDX-License-Identifier: Apache-2.0
"""The restarts at a run, as `run.json` lists them: when each began, from which step, in which job, how it ended."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import DISK_FULL
from tp_invariant_recipes.ledger.run_files import Config, Restart, Restarted, RestartJob
from tp_invariant_recipes.runs.run_dir import RunDir


def read_restarts(run_dir: RunDir) -> tuple[Restart, ...]:
    """Return the restarts at a run so far; none where there is no run yet. Raises RunError."""
    return run_dir.read_run(Restarted).attempts if run_dir.run.exists() else ()


def started(start: int, last: int, job: RestartJob | None, layout: dict[str, Any]) -> Restart:
    """Return a new restart, of this command, on this host. The arguments are as `Attempt` has them."""
    program = Path(sys.argv[0]).name
    return Restart(
        command=shlex.join(["tpi" if program == "__main__.py" else program, *sys.argv[1:]]),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        host=os.uname().nodename,
        from_step=start,
        to_step=last,
        layout=layout,
        job=job,
    )


def end(run_dir: RunDir, outcome: str, why: str | None = None, *, requeued: bool = False) -> None:
    """Record how the last restart ended. Raises RunError; for a full disk it leaves `RunDir.disk_full`.

    outcome: "completed", "stopped" or "failed". requeued: whether its job asks to be queued again.
    """
    *before, last = run_dir.read_run(Restarted).attempts
    try:
        _write(run_dir, [*before, replace(last, outcome=outcome, why=why, requeued=requeued)])
    except RunError as error:
        if getattr(error.__cause__, "errno", None) in DISK_FULL:
            with suppress(OSError):
                run_dir.disk_full.touch()
        raise


def _write(run_dir: RunDir, attempts: Sequence[Restart]) -> None:
    run_dir.write(run_dir.run, run_dir.read_run() | {"attempts": [attempt.as_json() for attempt in attempts]})


def refused(run_dir: RunDir, why: str, job: RestartJob | None) -> None:
    """Record a failed restart: an existing run could not even be planned. Raises RunError."""
    before = run_dir.read_run(Restarted).attempts
    step = before[-1].from_step if before else 0
    last = run_dir.read_config(Config).train.train_iters
    attempt = started(step, last, job, run_dir.read_run().get("layout", {}))
    _write(run_dir, [*before, replace(attempt, outcome="failed", why=why)])


def consecutive_failures(attempts: Sequence[Restart], start: int) -> int:
    """How many of the latest restarts began at step `start` and failed; one that a signal stopped has not."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.from_step != start or attempt.outcome in ("completed", "stopped"):
            break
        count += 1
    return count
