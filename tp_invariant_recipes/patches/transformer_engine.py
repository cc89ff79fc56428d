"""The condition that all patches of Transformer Engine share: the runs that they concern."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

PACKAGE = "transformer-engine"
MODULE = "transformer_engine"


def for_runs(wants: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any] | None], bool]:
    """`Patch.concerns` of a fix for runs on a GPU whose `model` section makes `wants` true."""

    def concerns(tree: dict[str, Any] | None) -> bool:
        if tree is not None and not (tree["device"]["kind"] == "gpu" and wants(tree["model"])):
            return False
        return loads()

    return concerns


def loads() -> bool:
    """Whether Transformer Engine can be imported. Megatron, too, works without it when its libraries are missing."""
    try:
        import_module(f"{MODULE}.pytorch")
    except (ImportError, OSError):
        return False
    return True
