"""Where a run has left things, and what one would do next with it. It looks at the run directory alone."""

import shlex
from pathlib import Path
from typing import Any

from tp_invariant_recipes.runs import overview
from tp_invariant_recipes.runs.run_dir import RunDir

OFFLINE = "offline-run-*"  # of wandb: one folder for each attempt
ARCHIVES = "*.zip"  # of Comet: one for each attempt


def as_json(run_dir: RunDir) -> dict[str, Any]:
    """Return the places as JSON.

    ledger, tensorboard, wandb, mlflow, comet: paths; None: there is none. wandb_sync, comet_upload: the command that
    uploads what was kept offline; None: nothing was. mlflow_ui: the command that shows what MLflow kept here; None:
    nothing. next: commands.
    """
    folder = run_dir.path / "wandb"
    shows = ["mlflow", "ui", "--backend-store-uri", str(run_dir.mlflow)]
    return {
        "ledger": _there(run_dir.ledger),
        "tensorboard": _there(run_dir.tensorboard),
        "wandb": _there(folder),
        # The attempts at a run are one run of wandb.
        "wandb_sync": _upload(["wandb", "sync", "--append"], folder, OFFLINE),
        "mlflow": _there(run_dir.mlflow),
        # MLflow shows a store of files only where this variable says so.
        "mlflow_ui": f"MLFLOW_ALLOW_FILE_STORE=true {shlex.join(shows)}" if run_dir.mlflow.exists() else None,
        "comet": _there(run_dir.comet),
        "comet_upload": _upload(["comet", "upload"], run_dir.comet, ARCHIVES),
        "next": _next(run_dir) if run_dir.ledger.exists() else [],
    }


def lines(places: dict[str, Any]) -> list[str]:
    """Return the places as lines of text."""
    sentences = [f"ledger: {places['ledger']}"] if places["ledger"] else []
    if places["tensorboard"]:
        sentences.append(f"curves: {shlex.join(['tensorboard', '--logdir', places['tensorboard']])}")
    for service, command in (("wandb", "wandb_sync"), ("mlflow", "mlflow_ui"), ("comet", "comet_upload")):
        if places[service]:
            sentences.append(places[command] or f"{service}: {places[service]}")
    if places["next"]:
        sentences.append(f"next: {'   '.join(places['next'])}")
    return sentences


def _there(path: Path) -> str | None:
    return str(path) if path.exists() else None


def _upload(command: list[str], folder: Path, pattern: str) -> str | None:
    kept = sorted(folder.glob(pattern))
    if len(kept) > 1:
        return f"{shlex.join(command)} {shlex.quote(str(folder))}/{pattern}"
    return shlex.join([*command, str(kept[0])]) if kept else None


def _next(run_dir: RunDir) -> list[str]:
    """Compare with the latest comparable run beside it, where there is one, and report."""
    run, other = str(run_dir.path), overview.comparable(run_dir.path)
    compared = shlex.join(["tpi", "compare", run, str(other)]) if other else f"tpi compare {shlex.quote(run)} RUN_B"
    return [compared, shlex.join(["tpi", "report", run, *([str(other)] if other else [])])]
