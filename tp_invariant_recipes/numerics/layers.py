"""What the invariant layers on Megatron-Core's local layers and on its Transformer Engine wrappers have in common.

A layer's parameters, names and checkpoints are those of the class it stands for; only `forward` is ours. V is
`config.virtual_shards`, how its products are summed across ranks `config.invariant_mode`.
"""

from functools import cached_property
from typing import Any

from torch import Tensor

from tp_invariant_recipes.numerics import gather, linear
from tp_invariant_recipes.numerics.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.norm import NormShards, rms_norm

# config.invariant_mode -> the module whose column_parallel and row_parallel the layers call.
STRATEGIES: dict[str, Any] = {"tree": linear, "gather": gather}


def mesh_of(config: Any, group: Any) -> VirtualMesh:
    """The virtual mesh of a tensor-parallel process group."""
    size = group.size()
    return VirtualMesh(config.virtual_shards, size, group.rank(), group if size > 1 else None)


def segments_of(config: Any, tp_comm_buffer_name: str | None) -> int:
    """Segments of a column-parallel weight; Megatron names the fused gate and up projection "fc1"."""
    return 2 if tp_comm_buffer_name == "fc1" and config.gated_linear_unit else 1


class ColumnForward:
    """Forward of a column-parallel layer, which has config, weight, bias, segments and a group."""

    config: Any
    segments: int

    @cached_property
    def mesh(self) -> VirtualMesh:
        """Looked up once, when the layer first runs."""
        return mesh_of(self.config, _group(self))

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s/t or s, b, k] → [s, b, n/t]."""
        strategy = STRATEGIES[self.config.invariant_mode]
        y = strategy.column_parallel(x, weight, self.mesh, self.segments, self.config.sequence_parallel)
        return y if bias is None else column_bias(y, bias)


class RowForward:
    """Forward of a row-parallel layer, which has config, weight, bias and a group."""

    config: Any

    @cached_property
    def mesh(self) -> VirtualMesh:
        """Looked up once, when the layer first runs."""
        return mesh_of(self.config, _group(self))

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, b, k/t] → [s/t or s, b, n]."""
        strategy = STRATEGIES[self.config.invariant_mode]
        y = strategy.row_parallel(x, weight, self.mesh, self.config.sequence_parallel)
        return y if bias is None else row_bias(y, bias, self.mesh, self.config.sequence_parallel)


class NormForward:
    """Forward of an RMSNorm over the hidden size; rows are positions."""

    config: Any
    weight: Tensor
    eps: float

    @cached_property
    def mesh(self) -> VirtualMesh:
        """Looked up once, when the layer first runs."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        return mesh_of(self.config, get_tensor_model_parallel_group())

    def shards_of(self) -> NormShards:
        """How the rows of this rank make up the V shards."""
        return NormShards.SEQUENCE_SLICE if self.config.sequence_parallel else NormShards.SEQUENCE_WHOLE

    def forward(self, x: Tensor) -> Tensor:
        """[s/t or s, b, h] → the same."""
        return rms_norm(x, self.weight, self.eps, self.mesh, self.shards_of())


class HeadNormForward(NormForward):
    """Forward of an RMSNorm of queries or keys; rows are heads, [s, b, heads/t, d]."""

    def shards_of(self) -> NormShards:
        """Heads are sharded whatever the sequence is."""
        return NormShards.HEADS


def _group(layer: Any) -> Any:
    """Megatron-Core's local layers call it tp_group, its Transformer Engine wrappers _tp_group."""
    return layer._tp_group if hasattr(layer, "_tp_group") else layer.tp_group
