"""Attention of Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), stock and invariant.

    Gemma 2    odd layers have windows; a score s becomes cap · tanh(s / cap) before the softmax
    Gemma 3    layers have windows but for one after every few; Bridge's layer turns these by other angles

Bridge computes Gemma 2's by torch's FlexAttention, whose kernels are compiled for the number of heads that a rank has.
Here Megatron-Core's own batched products compute it on every device, with scores in fp32 from the cap to the softmax.
"""

import copy
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from tp_invariant_recipes.numerics.megatron.local import InvariantDotProductAttention


class CappedSoftmax(FusedScaleMaskSoftmax):
    """Megatron-Core's softmax of capped scores. cap: of them."""

    cap: float

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """[b, heads/t, s, s] → the same."""
        scores = torch.tanh(input.float() / self.cap) * self.cap
        return self.forward_torch_softmax(scores, mask, softmax_offset).to(input.dtype)


class Gemma2Attention:
    """Windows, scale and cap, for a class that derives from DotProductAttention."""

    scale_mask_softmax: Any

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.window_size = config.window_size if layer_number % 2 else None
        kwargs["softmax_scale"] = config.query_pre_attn_scalar**-0.5
        super().__init__(config, layer_number, *args, **kwargs)  # type: ignore[call-arg]
        if config.attn_logit_softcapping:
            self.scale_mask_softmax.__class__ = CappedSoftmax
            self.scale_mask_softmax.cap = config.attn_logit_softcapping


class Gemma2DotProductAttention(Gemma2Attention, DotProductAttention):
    """Of stock runs on a CPU."""


class InvariantGemma2DotProductAttention(Gemma2Attention, InvariantDotProductAttention):
    """With launches that no layout changes."""

    def settings(self) -> tuple[Any, ...]:
        """Those of all local attention, and the cap."""
        return *super().settings(), getattr(self.scale_mask_softmax, "cap", None)


class Gemma3Windows:
    """Windows of all layers but those of whole attention, for a class of core attention."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        windows = layer_number % sum(config.interleaved_attn_pattern) != 0
        config = copy.copy(config)
        config.window_size = (config.window_size - 1, 0) if windows else None
        super().__init__(config, layer_number, *args, **kwargs)  # type: ignore[call-arg]


class Gemma3DotProductAttention(Gemma3Windows, DotProductAttention):
    """Of stock runs on a CPU."""


class InvariantGemma3DotProductAttention(Gemma3Windows, InvariantDotProductAttention):
    """With launches that no layout changes."""
