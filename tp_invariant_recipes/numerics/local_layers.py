"""Megatron-Core's local layers with invariant sums: same constructors, parameters, names and checkpoints.

`config.virtual_shards` is V; `numerics/spec.py` says which layer stands where.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor

from tp_invariant_recipes.numerics.linear import column_parallel, row_parallel
from tp_invariant_recipes.numerics.mesh import VirtualMesh
from tp_invariant_recipes.numerics.norm import NormShards, rms_norm


def mesh_of(config, group) -> VirtualMesh:
    """The virtual mesh of a tensor-parallel process group."""
    size = group.size()
    return VirtualMesh(config.virtual_shards, size, group.rank(), group if size > 1 else None)


class TreeColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear; Megatron names the fused gate and up projection "fc1"."""

    def __init__(self, *args, tp_comm_buffer_name: str | None = None, **kwargs) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.segments = 2 if tp_comm_buffer_name == "fc1" and self.config.gated_linear_unit else 1

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """[s/t or s, b, k] → [s, b, n/t], and the bias where it is added later."""
        if runtime_gather_output or (runtime_gather_output is None and self.gather_output):
            raise NotImplementedError("an invariant column-parallel layer does not gather its output")
        weight = self.weight if weight is None else weight
        mesh = mesh_of(self.config, self.tp_group)
        return column_parallel(input_, weight, mesh, self.segments, self.sequence_parallel), None


class TreeRowParallelLinear(RowParallelLinear):
    """Row-parallel linear."""

    def forward(self, input_: Tensor):
        """[s, b, k/t] → [s/t or s, b, n], and the bias where it is added later."""
        mesh = mesh_of(self.config, self.tp_group)
        return row_parallel(input_, self.weight, mesh, self.sequence_parallel), None


class TreeVocabParallelEmbedding(VocabParallelEmbedding):
    """Embedding: the ranks' sum is one value and zeros, so it is exact but for the sign of zero."""

    def forward(self, input_: Tensor) -> Tensor:
        """[b, s] → [b, s, h], or [s/t, b, h] with sequence parallelism."""
        return super().forward(input_) + 0.0


class TreeRMSNorm(torch.nn.Module):
    """RMSNorm over the hidden size; rows are positions."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.__dict__["sequence_parallel"] = config.sequence_parallel  # read by Megatron's gradient reduction

    def shards_of(self) -> NormShards:
        """How the rows of this rank make up the V shards."""
        return NormShards.SEQUENCE_SLICE if self.config.sequence_parallel else NormShards.SEQUENCE_WHOLE

    def forward(self, x: Tensor) -> Tensor:
        """[s/t or s, b, h] → the same."""
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        return rms_norm(
            x, self.weight, self.eps, mesh_of(self.config, get_tensor_model_parallel_group()), self.shards_of()
        )


class TreeHeadNorm(TreeRMSNorm):
    """RMSNorm of queries or keys; rows are heads, [s, b, heads/t, d]."""

    def shards_of(self) -> NormShards:
        """Heads are sharded whatever the sequence is."""
        return NormShards.HEADS
