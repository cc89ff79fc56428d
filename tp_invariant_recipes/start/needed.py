"""Packages that a plain `pip install` of this one does not bring: who needs them, and what a command says without them.

needed.check("tpi train", needed.TRAINING)     RunError: "tpi train needs megatron-bridge, which is not installed …"
"""

import importlib.util
from collections.abc import Sequence

from tp_invariant_recipes.errors import RunError

# Module -> the distribution that holds it. An import that fails below one of them says that it is missing.
DISTRIBUTIONS = {
    "megatron.bridge": "megatron-bridge",
    "megatron.core": "megatron-core",
    "megatron.energon": "megatron-energon",
    "megatron": "megatron-bridge",
    "torch": "torch",
    "transformers": "transformers",
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "emerging_optimizers": "emerging-optimizers",
    "numba": "numba",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "comet_ml": "comet-ml",
}
TRAINING = ("megatron.bridge", "megatron.core", "torch")
HOW = "make bootstrap in a checkout installs the versions that work together (docs/install.md; tpi doctor lists them)"


def check(command: str, modules: Sequence[str]) -> None:
    """Raise RunError where one of these modules is not installed. Nothing is imported but the parents of modules."""
    missing = [DISTRIBUTIONS[module] for module in modules if not there(module)]
    if missing:
        raise RunError(message(command, missing))


def there(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def message(command: str, distributions: Sequence[str]) -> str:
    """One sentence: what the command needs, and how to get it."""
    *others, last = distributions
    names, are = (f"{', '.join(others)} and {last}", "are") if others else (last, "is")
    return f"{command} needs {names}, which {are} not installed here: {HOW}"


def missing(error: ModuleNotFoundError) -> str | None:
    """Return the distribution whose absence an import has met; None: another module is missing, or this one is not."""
    name = error.name or ""
    module = next((package for package in DISTRIBUTIONS if name == package or name.startswith(f"{package}.")), None)
    if module is None or there(module):
        return None
    return DISTRIBUTIONS[module]
