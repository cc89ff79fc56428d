"""The attempts at a run, as `run.json` lists them: when each began, from which step, in which job, how it ended."""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from tp_invariant_recipes.ledger.run_files import Attempted, Config
from tp_invariant_recipes.runs.run_dir import RunDir, text_of


def read_attempts(run_dir: RunDir) -> list[dict[str, Any]]:
    """The attempts at a run so far; none where there is no run yet. Raises RunError."""
    return run_dir.read_run(Attempted)["attempts"] if run_dir.run.exists() else []


def begun(start: int, last: int, job: dict[str, Any] | None, layout: dict[str, Any]) -> dict[str, Any]:
    """A new attempt, of this command, on this host; it has not ended.

    start, last: steps completed when it begins, and when it will be done. job: of SLURM; None without one. layout: the
    degrees of parallelism by their short names.
    """
    return {
        "command": shlex.join(["tpi", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": os.uname().nodename,
        "from_step": start,
        "to_step": last,
        "layout": layout,
        "job": job,
        "outcome": None,
        "why": None,
        "requeued": False,
    }


def end(run_dir: RunDir, outcome: str, why: str | None = None, *, requeued: bool = False) -> None:
    """Record how the last attempt ended. Raises RunError.

    outcome: "completed", "stopped" or "failed". requeued: whether its job asks to be queued again.
    """
    run_dir.write(run_dir.run, _ended(run_dir, outcome, why, requeued=requeued))


def completed(run_dir: RunDir) -> bytes:
    """What `run.json` will hold once the last attempt, which is at its last step, has ended well. Raises RunError."""
    return text_of(run_dir.run, _ended(run_dir, "completed", None, requeued=False)).encode()


def _ended(run_dir: RunDir, outcome: str, why: str | None, *, requeued: bool) -> dict[str, Any]:
    run = run_dir.read_run(Attempted)
    run["attempts"][-1] |= {"outcome": outcome, "why": why, "requeued": requeued}
    return run


def refused(run_dir: RunDir, why: str, job: dict[str, Any] | None) -> None:
    """Record a failed attempt: an existing run could not even be planned. Raises RunError."""
    run = run_dir.read_run(Attempted)
    step = run["attempts"][-1]["from_step"] if run["attempts"] else 0
    run["attempts"].append(begun(step, run_dir.read_config(Config)["train"]["train_iters"], job, run.get("layout", {})))
    run_dir.write(run_dir.run, run)
    end(run_dir, "failed", why)


def consecutive_failures(attempts: Sequence[dict[str, Any]], start: int) -> int:
    """How many of the latest attempts, back to one that did not, began at step `start` and failed.

    An attempt that was stopped by a signal has not failed.
    """
    count = 0
    for attempt in reversed(attempts):
        if attempt["from_step"] != start or attempt.get("outcome") in ("completed", "stopped"):
            break
        count += 1
    return count
