"""The cross entropy that Megatron's models call by name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers import cross_entropy
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def cross_entropy_of_mode(original: Any, virtual_shards: int, name: str) -> Callable[..., Tensor]:
    """Return a replacement for Megatron's vocab_parallel_cross_entropy. name: of the mode."""

    def loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None) -> Tensor:
        if label_smoothing:
            raise NotImplementedError("label smoothing has no invariant version")
        mesh = VirtualMesh.from_group(virtual_shards, tp_group)
        return cross_entropy.vocab_parallel_cross_entropy(logits, target, mesh, kernels)

    kernels = mode.named_mode(name).cross_entropy()
    return loss
