"""Megatron-Core leaves most of the sinks of attention out of the gradient norm."""

from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.softmax_type=learnable and tp > 1 the norm that clips gradients has the sinks of the first "
    "tensor-parallel rank alone: Megatron-Core does not mark them as split"
)


def marked_as_split(original: Callable[..., None]) -> Callable[..., None]:
    """Replace DotProductAttention.__init__: the sinks are split over the ranks, along their only dimension."""

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **more)
        if getattr(self.softmax_offset, "requires_grad", False):
            self.softmax_offset.tensor_model_parallel = True

    return __init__


def not_marked() -> bool:
    """Whether the installed attention makes sinks without marking them."""
    made = code.source("megatron.core", "transformer/dot_product_attention.py", "__init__")
    return "softmax_offset" in made and "tensor_model_parallel" not in made


def learnable(config: Any) -> bool:
    """Whether a run has sinks that are split."""
    return config is None or (config.model.get("softmax_type") == "learnable" and config.layout.tp > 1)


PATCH = Patch(
    name="core-sinks-norm",
    package="megatron-core",
    need=Looks(not_marked, "a DotProductAttention that does not mark its sinks"),
    replaces={"megatron.core.transformer.dot_product_attention:DotProductAttention.__init__": marked_as_split},
    why=WHY,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/7530",
    concerns=learnable,
)
