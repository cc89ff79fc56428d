"""Megatron-Core's local layers with invariant sums."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor

from tp_invariant_recipes.numerics.layers import ColumnForward, HeadNormForward, NormForward, RowForward, segments_of


class InvariantColumnParallelLinear(ColumnForward, ColumnParallelLinear):
    """Column-parallel linear layer; on every device also Megatron's output layer."""

    def __init__(self, *args, tp_comm_buffer_name: str | None = None, **kwargs) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.segments = segments_of(self.config, tp_comm_buffer_name)

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it."""
        if runtime_gather_output or (runtime_gather_output is None and self.gather_output):
            raise NotImplementedError("an invariant column-parallel layer does not gather its output")
        return self.column(input_, self.weight if weight is None else weight, self.bias), None


class InvariantRowParallelLinear(RowForward, RowParallelLinear):
    """Row-parallel linear."""

    def forward(self, input_: Tensor):
        """[s, b, k/t] → [s/t or s, b, n], and None as bias, since the layer has added it."""
        return self.row(input_, self.weight, self.bias), None


class InvariantVocabParallelEmbedding(VocabParallelEmbedding):
    """Embedding: across ranks it sums one value and zeros, which is exact but for the sign of zero."""

    def forward(self, input_: Tensor) -> Tensor:
        """[b, s] → [b, s, h], or [s/t, b, h] with sequence parallelism."""
        return super().forward(input_) + 0.0


class InvariantRMSNorm(NormForward, torch.nn.Module):
    """RMSNorm over the hidden size."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.__dict__["sequence_parallel"] = config.sequence_parallel  # read by Megatron's gradient reduction


class InvariantHeadNorm(HeadNormForward, InvariantRMSNorm):
    """RMSNorm of queries or keys."""
