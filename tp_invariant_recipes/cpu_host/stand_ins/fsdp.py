# SPDX-License-Identifier: Apache-2.0
"""What Megatron-FSDP needs on a CPU: its device, meshes of Gloo groups, sums without NCCL's operations."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tp_invariant_recipes.replacement import Replacement, applied

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
_BUFFER = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"

_FIRST = Replacement("torch.cuda:current_device", lambda _: lambda: 0, "a device is named by its number")


def _on_cpu(original: Callable) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        with applied((_FIRST,)):
            original(self, *args, **{**kwargs, "device": torch.device("cpu")})

    return init


def _meshes(original: Any) -> SimpleNamespace:
    def from_group(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return original.from_group(*args, device_type="cpu", **kwargs)

    return SimpleNamespace(from_group=from_group)


def _unfused(original: Callable) -> Callable[[Any, Any, Any], Any]:
    """Scale gradients before the sum, which is the arithmetic of NCCL's fused operation."""

    def preprocessed(gradient: Any, factor: float | None, config: Any) -> Any:
        return original(
            gradient,
            factor,
            SimpleNamespace(average_in_collective=config.average_in_collective, gradient_reduce_div_fusion=False),
        )

    return preprocessed


def _freed_if_possible(original: Callable) -> Callable[[Any], None]:
    def free(tensor: Any) -> None:
        if tensor.untyped_storage().resizable():
            original(tensor)

    return free


REPLACEMENTS = (
    Replacement(f"{_ADAPTER}:FullyShardedDataParallel.__init__", _on_cpu, "it takes a CUDA device by default"),
    Replacement(f"{_ADAPTER}:DeviceMesh", _meshes, "its meshes are of CUDA devices"),
    Replacement(f"{_BUFFER}:gradient_reduce_preprocessing", _unfused, "only NCCL scales in a sum"),
    Replacement(f"{_BUFFER}:_free_storage", _freed_if_possible, "numpy has seen what loops of numerics=portable read"),
)  # fmt: skip
