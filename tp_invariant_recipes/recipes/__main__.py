"""Run Bridge's own recipe runner with our recipes known to it by name.

    torchrun --nproc_per_node=4 -m tp_invariant_recipes.recipes PATH/run_recipe.py --recipe tpi_qwen3_8b_pretrain_config

The runner is `scripts/training/run_recipe.py` of the Megatron-Bridge repository; it looks recipes up as attributes of
`megatron.bridge.recipes`.
"""

import runpy
import sys

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.patches import registry
from tp_invariant_recipes.recipes import named
from tp_invariant_recipes.start import bridge


def publish() -> None:
    """Make every recipe an attribute of `megatron.bridge.recipes`. Raises ConfigError if Bridge has one so named."""
    bridge.load()
    import megatron.bridge.recipes

    recipes = named()
    taken = [name for name in recipes if getattr(megatron.bridge.recipes, name, recipes[name]) is not recipes[name]]
    if taken:
        raise ConfigError(f"megatron.bridge.recipes already has {', '.join(taken)}")
    for name, function in recipes.items():
        setattr(megatron.bridge.recipes, name, function)


def main() -> None:
    """Publish the recipes, then run the script named first with the arguments after it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tp_invariant_recipes.recipes RUNNER.py [RUNNER'S ARGUMENTS]")
    publish()
    del sys.argv[0]
    with registry.applied():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
