# SPDX-License-Identifier: Apache-2.0
"""Packages that a plain `pip install` of this one does not bring: who needs them, and what a command says without them.

needed.check("tpi train", needed.TRAINING)     RunError: "tpi train needs megatron-bridge, … the locks base.txt, …"
"""

import importlib.util
from collections.abc import Sequence

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.machine.versions import lock_dir

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
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
TRAINING = ("megatron.bridge", "megatron.core", "torch")
SERVING = ("starlette", "uvicorn")
LOCKS = ("tools", "base", "torch", "megatron", "gpu")  # in scripts/lock; each needs those before it
# Distribution -> its lock, where that is not `megatron`; or the extra of this package that installs it.
LOCK_OF = {
    "numba": "base", "torch": "torch", "triton": "torch",
    **dict.fromkeys(("transformer-engine", "mamba-ssm", "causal-conv1d"), "gpu"),
}  # fmt: skip
EXTRAS = {"wandb": "wandb", "mlflow-skinny": "mlflow", "comet-ml": "comet", **dict.fromkeys(SERVING, "serve")}


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
    """One sentence: what the command needs, and which lock or extra has it."""
    *others, last = distributions
    names, are = (f"{', '.join(others)} and {last}", "are") if others else (last, "is")
    if {*distributions} <= EXTRAS.keys():
        extras = dict.fromkeys(EXTRAS[name] for name in distributions)
        how = f"pip install 'tp-invariant-recipes[{','.join(extras)}]'"
    else:
        last_lock = max(LOCKS.index(LOCK_OF.get(name, "megatron")) for name in distributions)
        files = ", ".join(f"{name}.txt" for name in LOCKS[: last_lock + 1])
        how = f"make bootstrap, or install the locks {files} of {lock_dir()} with Python 3.12 (docs/install.md)"
    return f"{command} needs {names}, which {are} not installed here: {how}"


def missing(error: ModuleNotFoundError) -> str | None:
    """Return the distribution whose absence an import has met; None: another module is missing, or this one is not."""
    name = error.name or ""
    module = next((package for package in DISTRIBUTIONS if name == package or name.startswith(f"{package}.")), None)
    if module is None or there(module):
        return None
    return DISTRIBUTIONS[module]
