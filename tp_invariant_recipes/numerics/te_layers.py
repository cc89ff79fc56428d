"""Megatron-Core's Transformer Engine wrappers with invariant sums. The import needs Transformer Engine."""

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
    _get_extra_te_kwargs,
)
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from tp_invariant_recipes.numerics.experts import activation_kind, expert_mlp
from tp_invariant_recipes.numerics.layers import (
    ColumnForward,
    HeadNormForward,
    NormForward,
    RowForward,
    segments_of,
    sequence_shards,
)
from tp_invariant_recipes.numerics.norm import rms_norm
from tp_invariant_recipes.numerics.token_dispatcher import Batches


class InvariantTELayerNormColumnParallelLinear(ColumnForward, TELayerNormColumnParallelLinear):
    """RMSNorm, then column-parallel linear."""

    def __init__(self, *args, tp_comm_buffer_name: str | None = None, **kwargs) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.segments = segments_of(self.config, tp_comm_buffer_name)

    def forward(self, x: Tensor):
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it."""
        normal = rms_norm(x, self.layer_norm_weight, self.eps, self.mesh, sequence_shards(self.config))
        return self.column(normal, self.weight, self.bias if self.use_bias else None), None


class InvariantTEColumnParallelLinear(ColumnForward, TEColumnParallelLinear):
    """Column-parallel linear."""

    def __init__(self, *args, tp_comm_buffer_name: str | None = None, **kwargs) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.segments = segments_of(self.config, tp_comm_buffer_name)

    def forward(self, x: Tensor):
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it."""
        return self.column(x, self.weight, self.bias if self.use_bias else None), None


class InvariantTERowParallelLinear(RowForward, TERowParallelLinear):
    """Row-parallel linear."""

    def forward(self, x: Tensor):
        """[s, b, k/t] → [s/t or s, b, n], and None as bias, since the layer has added it."""
        return self.row(x, self.weight, self.bias if self.use_bias else None), None


class InvariantTERMSNorm(NormForward, te.RMSNorm):
    """RMSNorm over the hidden size. It derives from te.RMSNorm, since Megatron-Core's TENorm only acts as a factory."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> None:
        super().__init__(
            normalized_shape=hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            **_get_extra_te_kwargs(config),
        )
        self.config, self.eps = config, eps


class InvariantTEHeadNorm(HeadNormForward, InvariantTERMSNorm):
    """RMSNorm of queries or keys."""


class InvariantTEGroupedMLP(TEGroupedMLP):
    """Experts whose weights are in two Transformer Engine modules and whose products are our own."""

    def forward(self, rows: Tensor, batches: Batches, probs: Tensor) -> tuple[Tensor, None]:
        """[r, h] → [r, h], and None as bias."""
        fc1, fc2 = (
            [getattr(linear, f"weight{expert}") for expert in range(self.num_local_experts)]
            for linear in (self.linear_fc1, self.linear_fc2)
        )
        return expert_mlp(rows, probs, batches, fc1, fc2, activation_kind(self.config)), None
