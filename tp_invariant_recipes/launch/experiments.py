"""Logging to Weights & Biases, MLflow or Comet: fields and variables."""

import os

from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.tables.logging_services import SERVICES


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
