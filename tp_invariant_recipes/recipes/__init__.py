"""The models as plain functions that return Megatron-Bridge's ConfigContainer, usable without our CLI.

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from tp_invariant_recipes.recipes import tpi_qwen3_8b_pretrain_config

    pretrain(tpi_qwen3_8b_pretrain_config(tp=4, iters=50), forward_step)

Each takes what follows the model on `tpi train`'s command line, as texts ("tp=4", "optimizer.adam_eps=1e-8") or as
keywords (tp=4, **{"optimizer.adam_eps": 1e-8}), and raises ConfigError listing every problem. These are the runs of
`tpi train numerics=deterministic`, or numerics=stock if asked. Invariant numerics replace functions, too, which a
ConfigContainer cannot do, so a recipe refuses numerics=tree. With NVTE_TP_INVARIANT_MODE=1 and `import
tp_invariant_recipes.invariant` the same recipe trains with the invariant numerics (docs/patch-mode.md).
`python -m tp_invariant_recipes.recipes` runs Bridge's own recipe runner with these names known to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.errors import ConfigError, refuse

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

    from tp_invariant_recipes.config.overrides import Override

# Of the names; the prefix distinguishes them from Bridge's own.
PREFIX, SUFFIX = "tpi_", "_pretrain_config"

NOT_HERE = (
    "a ConfigContainer holds the invariant layers, and not the rest (gradient norm, cross entropy, checks of the "
    "optimizer); use `tpi train`, or leave it out and import tp_invariant_recipes.invariant with "
    "NVTE_TP_INVARIANT_MODE=1"
)
NO_WEIGHTS = (
    "`tpi train` imports them, and a ConfigContainer does not; Bridge's pretrain() reads a Hugging Face folder that "
    "checkpoint.pretrained_checkpoint names"
)


def recipe(model: str, *overrides: str, device: str = "gpu", **keys: Any) -> ConfigContainer:
    """Return the configuration of `model` that `tpi train MODEL numerics=deterministic OVERRIDES…` builds, for Bridge's
    pretrain().

    overrides: as on the command line: "tp=4", "optimizer.adam_eps=1e-8".
    device:    "gpu", or "cpu" for code that runs inside `cpu_host.cpu.installed()`.
    keys:      the same as keywords: tp=4, sp=True, lr=3e-4, data="text".
    Raises ConfigError listing every problem.
    """
    from tp_invariant_recipes.config import container
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.config.overrides import parse_all
    from tp_invariant_recipes.numerics import mode

    problems: list[str] = []
    requested = [*parse_all(overrides), *_keyword_overrides(parse_all(overrides), keys, problems)]
    refused = [o for o in requested if o.path in ("numerics", "numerics.mode") and o.value not in mode.MEGATRONS]
    problems += [f"{override.text}: {NOT_HERE}" for override in refused]
    imported = [o for o in requested if o.path == "weights.folder" and o.value != "null"]
    problems += [f"{override.text}: {NO_WEIGHTS}" for override in imported]
    others = [o for o in requested if o not in (*refused, *imported)]
    try:
        config = compose(model, others, device=device, numerics=mode.DETERMINISTIC).config
    except ConfigError as error:
        problems += error.problems
    refuse(problems)
    return container.build(config)


def _keyword_overrides(texts: Sequence[Override], keys: Mapping[str, Any], problems: list[str]) -> list[Override]:
    """Return the overrides that keywords stand for. Problems of other keywords are appended to `problems`."""
    from tp_invariant_recipes.config.overrides import given, parse
    from tp_invariant_recipes.settings.values import value_text

    overrides = []
    for key, value in keys.items():
        if not _plain(value):
            problems.append(f"{key}: {value!r:.80} is no number, text, bool, None, or a list or dict of these")
            continue
        override = parse(f"{key}={value_text(value)}")
        other = given(texts, override.field)
        if other is not None and other.value != override.value:
            problems.append(f"{other.text} and the keyword {key}={value!r} contradict each other; give one of them")
        overrides.append(override)
    return overrides


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    return value is None or isinstance(value, bool | int | float | str)


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
