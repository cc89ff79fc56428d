"""Where a run has left things, and what one would do next with it. It looks at the run directory alone."""

import shlex
from pathlib import Path
from typing import Any

from tp_invariant_recipes.runs import overview
from tp_invariant_recipes.runs.run_dir import RunDir

OFFLINE = "offline-run-*"  # of wandb: one folder for each attempt


def of(run_dir: RunDir) -> dict[str, Any]:
    """The places as JSON.

    ledger, tensorboard, wandb: paths; None: there is none. wandb_sync: the command that uploads what wandb has kept
    offline; None: it has kept nothing. next: commands.
    """
    folder = run_dir.path / "wandb"
    return {
        "ledger": _there(run_dir.ledger),
        "tensorboard": _there(run_dir.tensorboard),
        "wandb": _there(folder),
        "wandb_sync": _sync(folder),
        "next": _next(run_dir) if run_dir.ledger.exists() else [],
    }


def lines(places: dict[str, Any]) -> list[str]:
    """The same for people."""
    found = [f"ledger: {places['ledger']}"] if places["ledger"] else []
    if places["tensorboard"]:
        found.append(f"curves: {shlex.join(['tensorboard', '--logdir', places['tensorboard']])}")
    if places["wandb"]:
        found.append(places["wandb_sync"] or f"wandb: {places['wandb']}")
    if places["next"]:
        found.append(f"next: {'   '.join(places['next'])}")
    return found


def _there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _sync(folder: Path) -> str | None:
    runs = sorted(path for path in folder.glob(OFFLINE) if path.is_dir())
    if len(runs) > 1:
        return f"wandb sync {shlex.quote(str(folder))}/{OFFLINE}"
    return shlex.join(["wandb", "sync", str(runs[0])]) if runs else None


def _next(run_dir: RunDir) -> list[str]:
    """Compare with the latest comparable run beside it, where there is one, and report."""
    run, other = str(run_dir.path), overview.comparable(run_dir.path)
    compared = shlex.join(["tpi", "compare", run, str(other)]) if other else f"tpi compare {shlex.quote(run)} RUN_B"
    return [compared, shlex.join(["tpi", "report", run, *([str(other)] if other else [])])]
