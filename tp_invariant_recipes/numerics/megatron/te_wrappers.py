# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's Transformer Engine wrappers with invariant sums. The import needs Transformer Engine."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
    _get_extra_te_kwargs,
)
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention
from transformer_engine.pytorch.utils import get_cudnn_version

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.megatron.attention.core_attention import CoreAttention, Mask
from tp_invariant_recipes.numerics.megatron.attention.mla import DuplicatedForward
from tp_invariant_recipes.numerics.megatron.base import (
    ColumnForward,
    ExpertsForward,
    HeadNormForward,
    NormForward,
    RowForward,
)
from tp_invariant_recipes.numerics.megatron.families.layers import AfterRow, Gemma3Windows


class InvariantTELayerNormColumnParallelLinear(ColumnForward, TELayerNormColumnParallelLinear):
    """RMSNorm or LayerNorm, then column-parallel linear."""

    def forward(self, x: Tensor) -> Any:
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it.

        An adapter reads the norm's result too, as Bridge has asked of the layer: then that comes beside the first.
        """
        bias, norm = self.bias if self.use_bias else None, (self.layer_norm_weight, self.layer_norm_bias)
        if not self.return_layernorm_output:
            return self.norm_column(x, norm, self.eps, self.weight, bias), None
        normal = self.normal(x, norm, self.eps)
        return (self.column(normal, self.weight, bias), normal), None


class InvariantTEColumnParallelLinear(ColumnForward, TEColumnParallelLinear):
    """Column-parallel linear."""

    def forward(self, x: Tensor) -> Any:
        """[s/t or s, b, k] → [s, b, n/t], and None as bias, since the layer has added it."""
        return self.column(x, self.weight, self.bias if self.use_bias else None), None


class InvariantTERowParallelLinear(RowForward, TERowParallelLinear):
    """Row-parallel linear."""

    def forward(self, x: Tensor) -> Any:
        """[s, b, k/t] → [s/t or s, b, n], and None as bias, since the layer has added it."""
        return self.row(x, self.weight, self.bias if self.use_bias else None), None


class InvariantTEDuplicatedLinear(DuplicatedForward, TELinear):
    """Linear that every rank holds whole: a down-projection of multi-latent attention."""

    def __init__(self, *args: Any, parallel_mode: str | None, bias: bool, **kwargs: Any) -> None:
        if parallel_mode != "duplicated" or bias:
            raise ConfigError("of TELinear only the duplicated mode without a bias has an invariant version")
        super().__init__(*args, parallel_mode=parallel_mode, bias=bias, **kwargs)


class TENormMixin(NormForward):
    """A norm over the hidden size, for a class that derives from Transformer Engine's, since TENorm is none itself."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> None:
        super().__init__(  # type: ignore[call-arg]
            normalized_shape=hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            **_get_extra_te_kwargs(config),
        )
        self.config, self.eps = config, eps


class InvariantTERMSNorm(TENormMixin, te.RMSNorm):
    """RMSNorm over the hidden size."""


class InvariantTELayerNorm(TENormMixin, te.LayerNorm):
    """LayerNorm over the hidden size."""


class InvariantTENorm:
    """Makes the norm that `normalization` names, as Megatron-Core's TENorm does."""

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """One of the two classes above."""
        kind = InvariantTELayerNorm if config.normalization == "LayerNorm" else InvariantTERMSNorm
        return kind(config, *args, **kwargs)


class InvariantTEHeadNorm(HeadNormForward, InvariantTERMSNorm):
    """RMSNorm of queries or keys."""


class InvariantTERowParallelLinearLayerNorm(AfterRow, InvariantTERowParallelLinear):
    """Row-parallel linear with a norm of its result."""

    after = InvariantTERMSNorm


class InvariantTEGroupedMLP(ExpertsForward, TEGroupedMLP):
    """Experts whose weights are in two Transformer Engine modules and whose GEMMs are our own."""

    def forward(self, rows: Tensor, batches: Batches, probs: Tensor) -> tuple[Tensor, None]:
        """[r, h] → [r, h], and None as bias."""
        (fc1, fc2), biases = self._both("weight"), self._both("bias") if self.config.add_bias_linear else None
        return self.experts(rows, probs, batches, fc1, fc2, biases), None

    def _both(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        first, second = (
            [getattr(linear, f"{name}{expert}") for expert in range(self.num_local_experts)]
            for linear in (getattr(module, "to_wrap", module) for module in (self.linear_fc1, self.linear_fc2))
        )
        return first, second


def without_flash[**P, R](original: Callable[P, R]) -> Callable[P, R]:
    """Return Transformer Engine's selection of an attention backend, as if flash-attn were not installed."""

    @wraps(original)
    def get_attention_backend(*args: P.args, **kwargs: P.kwargs) -> R:
        with patch.dict(os.environ, {"NVTE_FLASH_ATTN": "0"}):
            return original(*args, **kwargs)

    return get_attention_backend


class InvariantTEDotProductAttention(CoreAttention, TEDotProductAttention):
    """Attention of the backend that Transformer Engine selects, but for flash-attn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It keeps its latest selection for the process, in which a stock model may have run before.
        dot_product_attention._attention_backends["backend_selection_requires_update"] = True

    def launch(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sinks: Tensor | None = None) -> Tensor:
        """Megatron-Core's forward, for the heads given. Transformer Engine compares the groups with its attribute."""
        self.num_gqa_groups_per_partition = key.shape[2]
        with self.with_sinks(sinks):
            return TEDotProductAttention.forward(self, query, key, value, *mask)

    def backend(self) -> str:
        """Return what the latest launch in this process ran, as Transformer Engine has noted it."""
        chosen = dot_product_attention._attention_backends
        if chosen["use_flash_attention"]:
            return f"flash {chosen['flash_attention_backend']}"
        if chosen["use_fused_attention"]:
            version = ".".join(map(str, get_cudnn_version()))
            return f"fused {int(chosen['fused_attention_backend'])}, cuDNN {version}"
        return "unfused"

    def settings(self) -> tuple[Any, ...]:
        """Return the factor of the scores, the window, whether sums repeat, and the layer where scores depend on it."""
        layer = self.layer_number if self.config.apply_query_key_layer_scaling else None
        return self.unfused_attention.softmax_scale, self.window_size, self.deterministic, layer


class InvariantGemma3TEDotProductAttention(Gemma3Windows, InvariantTEDotProductAttention):
    """Attention of the backend that Transformer Engine selects, with the windows of Gemma 3."""
