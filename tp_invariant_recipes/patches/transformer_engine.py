# SPDX-License-Identifier: Apache-2.0
"""The condition that all patches of Transformer Engine share: the runs that they concern."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_invariant_recipes.settings.run_config import RunConfig

PACKAGE = "transformer-engine"
MODULE = "transformer_engine"


def on_gpus(wants: Callable[[dict[str, Any]], Any]) -> Callable[[RunConfig], bool]:
    """`Patch.reached` of runs on a GPU whose `model` section makes `wants` true."""
    return lambda config: config.device.kind == "gpu" and bool(wants(config.model))


def loads() -> bool:
    """Whether Transformer Engine can be imported. Megatron, too, works without it when its libraries are missing."""
    try:
        import_module(f"{MODULE}.pytorch")
    except (ImportError, OSError):
        return False
    return True
