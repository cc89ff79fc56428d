# SPDX-License-Identifier: Apache-2.0
"""Layers of numerics=portable, where those of tree have a library's arithmetic: bf16, on a CPU."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.gemm import sampling
from tp_invariant_recipes.numerics.gemm.defined import gemm
from tp_invariant_recipes.numerics.layers.experts.experts import Activation
from tp_invariant_recipes.numerics.megatron.attention.mla import MLADotProductAttention
from tp_invariant_recipes.numerics.megatron.local import InvariantDotProductAttention
from tp_invariant_recipes.numerics.megatron.router import (
    InvariantSequentialMLP,
    InvariantSharedExpertMLP,
    InvariantTopKRouter,
)
from tp_invariant_recipes.portable import cached_pass
from tp_invariant_recipes.portable.definition import DEFINITION
from tp_invariant_recipes.portable.ieee import functions
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu
from tp_invariant_recipes.portable.ieee.attention import Attended, attention_backward, attention_forward
from tp_invariant_recipes.portable.ieee.router import route_by_sigmoid, route_tokens, route_tokens_backward
from tp_invariant_recipes.portable.ieee.swiglu import swiglu, swiglu_backward


def _activation(x: Tensor, probs: Tensor, kind: str) -> Tensor:
    _check(kind)
    return swiglu(x, probs)


def _activation_backward(dy: Tensor, x: Tensor, probs: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    _check(kind)
    return swiglu_backward(dy, x, probs)


def _check(kind: str) -> None:
    if kind != "swiglu":
        raise NotImplementedError(f"an expert's {kind} has no portable version")


STATED = Activation(_activation, _activation_backward)


class PortableTopKRouter(InvariantTopKRouter):
    """Chooses the experts of each token as portable/ieee/router.py defines it."""

    products = staticmethod(gemm)
    widens = False

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s/t, b, E] → probabilities and routing map, [n, E]."""
        if padding_mask is not None:
            raise NotImplementedError("a padding mask has no portable version")
        rows, config = logits.view(-1, self.config.num_moe_experts), self.config
        if self.score_function == "sigmoid":
            groups = (config.moe_router_num_groups, config.moe_router_group_topk)
            probs, scores, chosen = route_by_sigmoid(
                rows, self.topk, self.expert_bias, groups if groups[1] else None, config.moe_router_topk_scaling_factor
            )
        else:
            probs, scores, chosen = _Routing.apply(rows, self.topk)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._apply_aux_loss(probs, scores, chosen)
            probs = self._apply_seq_aux_loss(probs, scores, chosen, *logits.shape[:2])
            probs = self._apply_global_aux_loss(probs, scores, chosen)
        TopKRouter._apply_expert_bias(self, chosen)
        return probs, chosen


class _Routing(LayerFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
        probs, scores, chosen = route_tokens(logits, topk)
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        return probs, scores, chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, chosen = ctx.saved_tensors
        dprobs, dscores, _ = gradients
        return route_tokens_backward(dprobs, dscores, logits, chosen), None


class PortableSequentialMLP(InvariantSequentialMLP):
    """Experts that are separate modules, by defined products."""

    activation = STATED


class PortableDotProductAttention(InvariantDotProductAttention):
    """Causal attention as portable/ieee/attention.py defines it."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[s, b, heads/t, d] and two of [s, b, groups/t, d] → [s, b, heads/t · d].

        Raises NotImplementedError: anything but a plain causal mask.
        """
        if attention_bias is not None or packed_seq_params is not None:
            raise NotImplementedError("attention with a bias or packed sequences has no portable version")
        if (attn_mask_type or self.attn_mask_type) is not AttnMaskType.causal or self.scale_mask_softmax.window_size:
            raise NotImplementedError("only causal attention over all keys has a portable version")
        if attention_mask is not None and not _is_causal(attention_mask, query.shape[0]):
            raise NotImplementedError("attention with a mask of its own has no portable version")
        if self.scale_mask_softmax.scale is not None:
            raise NotImplementedError("scores that are scaled twice have no portable version")
        width = value.shape[-1]
        if width < query.shape[-1]:  # of multi-latent attention: features of zeros change no other one
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        out = self._attended(query, key, value)
        return out if width == query.shape[-1] else out.unflatten(2, (query.shape[2], -1))[..., :width].flatten(2)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if (now := cached_pass.current()) is not None:
            return now.attend(self.layer_number, query, key, value, self.softmax_scale)
        out = _Attention.apply(query, key, value, self.softmax_scale)
        groups = key.shape[2]

        def recompute(number: int) -> Tensor:
            q, k, v = (operand.detach().chunk(groups, 2)[number] for operand in (query, key, value))
            return attention_forward(q, k, v, self.softmax_scale).out.flatten(2)

        sampling.repeat(out, recompute, groups, self.layer_number)
        return out

    def backend(self) -> str:
        """Return the definition, with its version."""
        return f"portable {DEFINITION}"


class PortableMLADotProductAttention(PortableDotProductAttention, MLADotProductAttention):
    """The same of multi-latent attention, whose values are narrower than its keys."""


class PortableSharedExpertMLP(InvariantSharedExpertMLP):
    """Experts that see every token, with a specified gate."""

    sigmoid = staticmethod(functions.sigmoid)


def apply_output_gate(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Replace Attention._apply_output_gate: x · sigmoid(gate) in fp32, rounded once. x: [s, b, h]; gate: as many."""
    return (x.float() * functions.sigmoid(gate.float().contiguous().view(x.shape))).to(x.dtype)


def _is_causal(mask: Tensor, length: int) -> bool:
    """Whether a mask, [.., s, s], true where a key is hidden, hides what comes after the query and nothing else."""
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    return mask.shape[-2:] == causal.shape and bool((mask.bool() == causal).all())


class _Attention(LayerFunction):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attended = attention_forward(query, key, value, scale)
        ctx.save_for_backward(query, key, value, *attended)
        ctx.scale = scale
        return attended.out.reshape(*query.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *attended = ctx.saved_tensors
        gradient = gradients[0].reshape(query.shape)
        return *attention_backward(gradient, query, key, value, Attended(*attended), ctx.scale), None


def mlp_forward(self: Any, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_: Any) -> Any:
    """Replace MLP.forward: [s, b, h] → [s, b, h], and None as bias. SwiGLU as portable/ieee/swiglu.py defines it."""
    if per_token_scale is not None:
        raise NotImplementedError("an expert has no portable version")
    gate_and_up, _ = self.linear_fc1(hidden_states)
    return self.linear_fc2(_SwiGLU.apply(gate_and_up))


def gated(x: Tensor, z: Tensor) -> Tensor:
    """silu(z) x in fp32, rounded once. Both […, f] of one shape and dtype."""
    return _SwiGLU.apply(torch.cat([z, x], -1))


class _SwiGLU(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return ieee_swiglu.swiglu(_rows(x)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return ieee_swiglu.swiglu_backward(_rows(gradients[0]), _rows(x))[0].view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, *_: Any,
    mla_rotary_interleaved: bool = False, **__: Any,
) -> Tensor:  # fmt: skip
    """Replace Megatron's function: the positions of portable/ieee/rotary.py. t: [s, b, heads, d]; of freqs, [s, 1, 1,
    dim], only the shape counts. Of a cached pass each row has a position of its own."""
    if cu_seqlens is not None or mscale != 1.0 or freqs.shape[0] != t.shape[0]:
        raise NotImplementedError("only rotary positions of whole sequences have a portable version")
    if mla_rotary_interleaved:  # pairs of multi-latent attention lie side by side
        t = torch.cat([t[..., 0::2], t[..., 1::2]], -1)
    scaling = _scaling(config)
    if (now := cached_pass.current()) is not None:
        return ieee_rotary.rotate(t, *now.turns(freqs.shape[-1], config.rotary_base, scaling))
    cos, sin = ieee_rotary.tables(freqs.shape[0], freqs.shape[-1], config.rotary_base, scaling, str(t.device))
    return _Rotated.apply(t, cos, sin)


def _scaling(config: Any) -> float | ieee_rotary.Yarn | None:
    """Return how positions are scaled, as `ieee_rotary.tables` takes it; by 1 they are not."""
    if config.multi_latent_attention and config.rope_type == "yarn" and config.rotary_scaling_factor != 1:
        range_of = config.original_max_position_embeddings, config.beta_fast, config.beta_slow
        return ieee_rotary.Yarn(config.rotary_scaling_factor, *range_of)
    return config.rope_scaling_factor if getattr(config, "rope_scaling", False) else None


class _Rotated(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return ieee_rotary.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return ieee_rotary.rotate(gradients[0], cos, sin, backward=True), None, None
