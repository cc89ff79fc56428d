"""Logging to Weights & Biases, MLflow or Comet: the packages, fields and variables that it needs."""

import os
from dataclasses import dataclass

from tp_invariant_recipes.host import needed
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class Service:
    """One value of `logging=`.

    module: what Bridge imports. extra: of this package, which brings it. run_name: Bridge's field for the run's name.
    """

    module: str
    extra: str
    run_name: str


SERVICES = {
    "wandb": Service("wandb", "wandb", "wandb_exp_name"),
    "mlflow": Service("mlflow", "mlflow", "mlflow_run_name"),
    "comet": Service("comet_ml", "comet", "comet_experiment_name"),
}


def problems(config: RunConfig) -> list[str]:
    """The packages that logging needs and this machine lacks."""
    kind = config.logging.kind
    if kind not in SERVICES or needed.there(SERVICES[kind].module):
        return []
    service = SERVICES[kind]
    return [
        f"logging={kind} needs {needed.DISTRIBUTIONS[service.module]}, which is not installed here: pip install "
        f"'tp-invariant-recipes[{service.extra}]' (docs/logging.md)"
    ]


def logger_fields(config: RunConfig, run_dir: RunDir) -> dict[str, str]:
    """Fields of the section `logger`: where the curves of a run go."""
    kind = config.logging.kind
    if kind == "none":
        return {}
    fields = {"tensorboard_dir": str(run_dir.tensorboard)}  # Bridge logs nowhere without a writer of TensorBoard
    if kind in SERVICES:
        fields[SERVICES[kind].run_name] = config.logging.name or run_dir.path.name
    if kind == "wandb":
        fields["wandb_save_dir"] = str(run_dir.path)
    if kind == "mlflow":
        uri = config.section("logger").get("mlflow_tracking_uri")
        if not (uri or "MLFLOW_TRACKING_URI" in os.environ):
            fields["mlflow_tracking_uri"] = str(run_dir.mlflow)
    return fields


def variables(config: RunConfig) -> dict[str, str]:
    """Environment variables for the ranks."""
    kind = config.logging.kind
    if kind == "wandb" and "WANDB_API_KEY" not in os.environ:
        return {"WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
    if kind == "mlflow":
        # MLflow 3.17 requires this variable. A database in a file, its default, is unsafe on a network file system.
        return {"MLFLOW_ALLOW_FILE_STORE": os.environ.get("MLFLOW_ALLOW_FILE_STORE", "true")}
    return {}
