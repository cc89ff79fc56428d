"""The models as plain functions that return Megatron-Bridge's ConfigContainer, for Bridge's own recipe runner.

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from tp_invariant_recipes.recipes import tpi_qwen3_8b_pretrain_config

    pretrain(tpi_qwen3_8b_pretrain_config(tp=4, iters=50), forward_step)

Each is `tpi.recipe` of its model with numerics=stock, since Bridge's own pretrain() trains nothing else; within
`tpi.invariant()` it trains with the invariant numerics (docs/patch-mode.md). `python -m tp_invariant_recipes.recipes`
runs Bridge's own recipe runner with these names known to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

# Of the names; the prefix distinguishes them from Bridge's own.
PREFIX, SUFFIX = "tpi_", "_pretrain_config"


def recipe(model: str, *overrides: Any, device: str = "gpu", **keys: Any) -> ConfigContainer:
    """Return the configuration of `model` that `tpi train MODEL numerics=stock OVERRIDES…` builds.

    overrides, keys: as for `tpi.recipe`. device: where neither names one; "cpu" is for code within the CPU host.
    Raises ConfigError listing every problem.
    """
    from tp_invariant_recipes.api.megatron import container_of
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.config.overrides import requested
    from tp_invariant_recipes.numerics import mode

    return container_of(compose(model, requested(overrides, keys), device=device, numerics=mode.STOCK))


def named() -> dict[str, Callable[..., ConfigContainer]]:
    """Every recipe by its name, as Bridge's runner looks them up: a file of conf/model/ is one."""
    from tp_invariant_recipes.settings import conf_files

    return {f"{PREFIX}{model}{SUFFIX}": _function(model) for model in conf_files.groups()["model"]}


def __getattr__(name: str) -> Callable[..., ConfigContainer]:
    """`tpi_MODEL_pretrain_config`, without a function written down for every model."""
    if name.startswith(PREFIX) and name in (recipes := named()):
        return recipes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *named()]


@functools.cache
def _function(model: str) -> Callable[..., ConfigContainer]:
    from tp_invariant_recipes.settings import conf_files

    def function(*overrides: str, **keys: Any) -> ConfigContainer:
        return recipe(model, *overrides, **keys)

    function.__name__ = function.__qualname__ = f"{PREFIX}{model}{SUFFIX}"
    function.__doc__ = conf_files.summary("model", model)
    return function
