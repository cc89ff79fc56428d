"""Services that keep the curves of many runs: one row a value of `logging=`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """A service, by fields of Bridge's section `logger`.

    module: what Bridge imports. extra: of this package, which brings it.
    project, run_name: fields for `logging.project` and the run's name.
    signs: fields that Bridge takes for a wish to log there, whatever `logging=` says.
    """

    module: str
    extra: str
    project: str
    run_name: str
    signs: tuple[str, ...]


SERVICES = {
    "wandb": Service("wandb", "wandb", "wandb_project", "wandb_exp_name", ("wandb_project",)),
    "mlflow": Service("mlflow", "mlflow", "mlflow_experiment", "mlflow_run_name",
                      ("mlflow_description", "mlflow_experiment", "mlflow_run_name", "mlflow_tags",
                       "mlflow_tracking_uri")),
    "comet": Service("comet_ml", "comet", "comet_project", "comet_experiment_name",
                     ("comet_experiment_name", "comet_project", "comet_tags", "comet_workspace")),
}  # fmt: skip
