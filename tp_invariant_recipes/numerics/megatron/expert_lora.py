# SPDX-License-Identifier: Apache-2.0
"""LoRA of experts: Bridge's two kinds of adapters with invariant sums (numerics/layers/experts/expert_adapters.py).

    peft.share_expert_adapters    A and B of a layer's fc1 or fc2                           reduced as
    true, Bridge's default        [dim, k] and [n, dim], the same for all experts           the router's weight
    false                         [E/ep, dim, k] and [E/ep, n, dim], one for each expert    the experts' weights

Bridge has them where Transformer Engine holds a layer's experts in two modules. On a CPU each expert is a module of its
own, and Bridge would give each one adapters whatever the setting is. So `AllExperts` stands for the two modules there:
adapters have one name, one shape and one place in checkpoints on every device. Experts have no tensor parallelism of
their own (`expert_tensor_parallel_size=1`), so each matrix lies whole on its ranks.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, wraps
from typing import Any

import torch
from megatron.bridge.peft.utils import (
    AdapterAttributes,
    GroupedExpertLinearAdapter,
    ParallelLinearAdapter,
    _make_grouped_expert_sharded_tensor,
)
from torch import Tensor

from tp_invariant_recipes.numerics.layers.experts.expert_adapters import adapter_linear
from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts
from tp_invariant_recipes.numerics.layers.experts.experts import mark_separate
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.megatron.router import InvariantSequentialMLP


class _OfExperts:
    """Forward of an adapter of experts, whose modules hold the weights and never run."""

    config: Any
    linear_in: Any
    linear_out: Any
    alpha: int
    dim: int

    @cached_property
    def owners(self) -> ExpertHosts:
        """Looked up once, when the layer first runs."""
        from megatron.core import parallel_state

        tp, ep = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group()
        return ExpertHosts.from_config(self.config, tp, ep)

    def forward(self, x: Tensor, batches: Batches) -> Tensor:
        """Compute what is added to the GEMM of all experts: [r, k] → [r, n]."""
        low = adapter_linear(x, self.linear_in.weight, batches, self.owners)
        return adapter_linear(low, self.linear_out.weight, batches, self.owners) * (self.alpha / self.dim)


class InvariantSharedExpertAdapter(_OfExperts, ParallelLinearAdapter):
    """One adapter for all experts of a layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_legacy_shared_expert_adapter_checkpoint = True  # Bridge's name for one matrix in a checkpoint
        for weight in (self.linear_in.weight, self.linear_out.weight):
            weight.allreduce = True
            weight.tensor_model_parallel = False
            weight.sequence_parallel = self.config.sequence_parallel

    def _register_shared_expert_grad_sync_hooks(self) -> None:
        """None: the sum over experts is a tree (numerics/layers/experts/expert_adapters.py)."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """One matrix, of which every rank of a pipeline stage has a replica."""
        from megatron.core import parallel_state

        replica = (
            0,
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        state = super().sharded_state_dict(*args, **kwargs)
        for value in state.values():
            value.replica_id = replica
        return state


class InvariantGroupedExpertAdapter(_OfExperts, GroupedExpertLinearAdapter):
    """One adapter for each expert."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mark_separate(self)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Bridge's, but for gate and up in one part: no rank has a slice of either."""
        weights = {f"{prefix}{name}.weight": getattr(self, name).weight for name in ("linear_in", "linear_out")}
        return {
            key: _make_grouped_expert_sharded_tensor(
                weight, key, tp_axis=None, sharded_offsets=sharded_offsets, pg_collection=self.pg_collection
            )
            for key, weight in weights.items()
        }


# --- Experts that are modules of their own ---


class AllExperts(torch.nn.Module):
    """Stands for `linear_fc1` or `linear_fc2` of all experts of a rank, as Bridge reads it. It never runs.

    layers: that layer of each expert.
    """

    layers: list[Any]

    def __init__(self, layers: list[Any], config: Any) -> None:
        super().__init__()
        self.__dict__["layers"] = layers  # registered with their experts
        self.config, self.num_gemms = config, len(layers)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """Those of the layers, for their device and dtype."""
        return (parameter for layer in self.layers for parameter in layer.parameters(recurse))

    def attributes(self) -> AdapterAttributes:
        """Bridge's description."""
        layer = self.layers[0]
        return AdapterAttributes(
            input_is_parallel=hasattr(layer, "input_is_parallel"), in_features=layer.input_size,
            out_features=layer.output_size, disable_tensor_parallel_comm=False, disable_sequence_parallel_comm=True,
            base_linear_is_parallel=True,
        )  # fmt: skip


def stand_for_experts(model_chunks: list[Any]) -> None:
    """Give experts that are modules of their own what Bridge adapts."""
    for experts in (module for chunk in model_chunks for module in chunk.modules()):
        if isinstance(experts, InvariantSequentialMLP):
            for name in ("linear_fc1", "linear_fc2"):
                layers = [getattr(expert, name) for expert in experts.local_experts]
                setattr(experts, name, AllExperts(layers, experts.config))


def without_local_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for LoRA.transform, which leaves an expert of its own to the adapters of all."""

    @wraps(original)
    def transform(self: Any, module: Any, name: str | None = None, prefix: str | None = None) -> Any:
        if "local_experts" in (prefix or "").split("."):
            return module
        return original(self, module, name, prefix)

    return transform
