"""The packages that logging to Weights & Biases, MLflow or Comet needs."""

from dataclasses import dataclass

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.start import needed


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


def missing_package(config: RunConfig) -> Problem | None:
    """Return what logging needs and this machine lacks."""
    kind = config.logging.kind
    if kind not in SERVICES or needed.there(SERVICES[kind].module):
        return None
    service = SERVICES[kind]
    return Problem(
        "",
        f"logging={kind} needs {needed.DISTRIBUTIONS[service.module]}, which is not installed here: pip install "
        f"'tp-invariant-recipes[{service.extra}]' (docs/logging.md)",
    )
