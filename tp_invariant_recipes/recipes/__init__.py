"""The models as plain functions that return Megatron-Bridge's ConfigContainer, usable without our CLI.

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from tp_invariant_recipes.recipes import tpi_qwen3_8b_pretrain_config

    pretrain(tpi_qwen3_8b_pretrain_config("tp=4", "iters=50"), forward_step)

Each takes what follows the model on `tpi train`'s command line, and raises ConfigError listing every problem. These are
the runs of `tpi train numerics=stock`. Invariant numerics also replace functions that Megatron calls by name, which a
ConfigContainer cannot do, so a recipe refuses numerics=tree. With NVTE_TP_INVARIANT_MODE=1 and `import
tp_invariant_recipes.invariant` the same recipe trains with the invariant numerics (docs/numerics.md, "Can I use it
without the recipes?").
`python -m tp_invariant_recipes.recipes` runs Bridge's own recipe runner with these names known to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_invariant_recipes.errors import ConfigError, listed

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

NOT_HERE = (
    "a ConfigContainer holds the invariant layers, and not the rest (gradient norm, cross entropy, checks of the "
    "optimizer); use `tpi train`, or leave it out and import tp_invariant_recipes.invariant with "
    "NVTE_TP_INVARIANT_MODE=1"
)


def recipe(model: str, *overrides: str, device: str = "gpu") -> ConfigContainer:
    """The configuration of `model` that `tpi train MODEL numerics=stock OVERRIDES…` builds, for Bridge's pretrain().

    overrides: as on the command line: "tp=4", "optimizer.adam_eps=1e-8".
    device:    "gpu", or "cpu" for code that runs inside `host.cpu.installed()`.
    Raises ConfigError listing every problem.
    """
    from tp_invariant_recipes.config import container
    from tp_invariant_recipes.config.compose import compose
    from tp_invariant_recipes.config.overrides import parse_all

    refused = [o for o in parse_all(overrides) if o.path in ("numerics", "numerics.mode") and o.value != "stock"]
    problems = [f"{override.text}: {NOT_HERE}" for override in refused]
    others = [o for o in parse_all(overrides) if o not in refused]
    try:
        tree = compose(model, others, device=device, numerics="stock").tree
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(listed(problems), problems)
    return container.build(tree)


def tpi_qwen3_toy_pretrain_config(*overrides: str) -> ConfigContainer:
    """A Qwen3 small enough for a CPU: 2 layers, 8 heads, byte vocabulary."""
    return recipe("qwen3_toy", *overrides)


def tpi_qwen3_0p6b_pretrain_config(*overrides: str) -> ConfigContainer:
    """Qwen3-0.6B."""
    return recipe("qwen3_0p6b", *overrides)


def tpi_qwen3_8b_pretrain_config(*overrides: str) -> ConfigContainer:
    """Qwen3-8B."""
    return recipe("qwen3_8b", *overrides)


def tpi_qwen3_moe_toy_pretrain_config(*overrides: str) -> ConfigContainer:
    """The Qwen3-30B-A3B shape cut to 4 layers, 8 experts, 2 per token."""
    return recipe("qwen3_moe_toy", *overrides)


def tpi_qwen3_30b_a3b_pretrain_config(*overrides: str) -> ConfigContainer:
    """Qwen3-30B-A3B."""
    return recipe("qwen3_30b_a3b", *overrides)


def tpi_nemotron3_nano_toy_pretrain_config(*overrides: str) -> ConfigContainer:
    """Every layer kind of Nemotron-3-Nano in 7 layers, 8 experts, 2 per token."""
    return recipe("nemotron3_nano_toy", *overrides)


def tpi_nemotron3_nano_pretrain_config(*overrides: str) -> ConfigContainer:
    """Nemotron-3-Nano 30B-A3B."""
    return recipe("nemotron3_nano", *overrides)


# By name, as Bridge's recipe runner looks them up. The prefix keeps them apart from Bridge's own.
RECIPES = {
    function.__name__: function
    for function in (
        tpi_qwen3_toy_pretrain_config,
        tpi_qwen3_0p6b_pretrain_config,
        tpi_qwen3_8b_pretrain_config,
        tpi_qwen3_moe_toy_pretrain_config,
        tpi_qwen3_30b_a3b_pretrain_config,
        tpi_nemotron3_nano_toy_pretrain_config,
        tpi_nemotron3_nano_pretrain_config,
    )
}
