# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of numerics=portable: the layer of numerics/megatron/families/delta_net.py with stated operations.

A head's numbers depend on no other head, so virtual shards change nothing between the two projections. In a cached pass
(cached_pass.py) the convolution begins with the last tokens of each sequence, and the rule with its state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.causal_conv import TAPS
from tp_invariant_recipes.kernels.delta_rule import EPSILON
from tp_invariant_recipes.numerics.megatron.families.delta_net import InvariantGatedDeltaNet
from tp_invariant_recipes.numerics.sums.weight_gradient import added_by_itself
from tp_invariant_recipes.portable import cached_pass
from tp_invariant_recipes.portable.ieee import functions
from tp_invariant_recipes.portable.ieee.delta_rule import Numbers, delta_rule, delta_rule_backward
from tp_invariant_recipes.portable.ieee.norm import rms_norm_backward, rms_norm_forward
from tp_invariant_recipes.portable.layers import gated


class PortableGatedDeltaNet(InvariantGatedDeltaNet):
    """A gated delta net whose every operation is specified."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[Tensor, Any]:
        """[s/t or s, b, h] → the same, and out_proj's bias: None. attention_mask: not read, as of stock."""
        if packed_seq_params is not None:
            raise NotImplementedError("packed sequences in gated delta nets have no portable version")
        projected, _bias = self.in_proj(hidden_states)
        *qkv, z, beta, alpha = projected.split(self.in_proj_split_sections, -1)
        s, b = projected.shape[:2]
        mixed = self._convolved(torch.cat(qkv, -1).flatten(0, 1), b)
        y = self._ruled(mixed, alpha.flatten(0, 1), beta.flatten(0, 1), b).to(projected.dtype)
        return self.out_proj(gated(self.out_norm(y.view(s, b, *y.shape[1:])).flatten(2), z))

    def _convolved(self, x: Tensor, batch: int) -> Tensor:
        """silu of the sum of w[k] x[t - 3 + k] in the order of k, each step in fp32, rounded once. x: [s · b, c]."""
        now = cached_pass.current()
        past = _Past.apply(x.float(), batch) if now is None else now.past(self.layer_number, x)
        weight = added_by_itself(self.conv1d.weight).float().squeeze(1)
        first, *others = (functions.spread(weight[None, :, tap], len(x))[0] for tap in range(TAPS))
        total = first * past[0]
        for factor, tokens in zip(others, past[1:], strict=True):
            total = total + factor * tokens
        return (total * functions.sigmoid(total)).to(x.dtype)

    def _ruled(self, x: Tensor, alpha: Tensor, beta: Tensor, batch: int) -> Tensor:  # type: ignore[override]
        """[s · b, q | k | v], [s · b, heads] twice → [s · b, heads, value] fp32."""
        key, rows = self.key_head_dim, len(x)
        q, k, v = x.float().split((self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp), -1)
        each = self.num_value_heads // self.num_key_heads
        # Of unit length; a query is divided by sqrt(key), too.
        q, k = (_Unit.apply(part.reshape(-1, 1, key), factor) for part, factor in ((q, 1.0 / key), (k, key**-0.5)))
        q, k = (functions.spread(part.squeeze(1), each).reshape(rows, -1, key) for part in (q, k))
        log_a, dt_bias = (
            functions.spread(added_by_itself(weight).float().view(1, -1), rows)[0]
            for weight in (self.A_log, self.dt_bias)
        )
        decay = functions.exp(-functions.exp(log_a) * functions.softplus(alpha.float() + dt_bias))
        numbers = q, k, v.reshape(rows, -1, self.value_head_dim), decay, functions.sigmoid(beta.float())
        now = cached_pass.current()
        return _Rule.apply(batch, *numbers) if now is None else now.walk(self.layer_number, Numbers(*numbers))


class _Past(LayerFunction):
    """[s · b, c] → what each of TAPS weights multiplies, the earliest token first; zeros before the first token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: int) -> tuple[Tensor, ...]:
        ctx.batch = batch
        padded = torch.cat([x.new_zeros((TAPS - 1) * batch, x.shape[1]), x])
        return tuple(padded[tap * batch : tap * batch + len(x)] for tap in range(TAPS))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[-1]
        for lag in range(1, TAPS):
            later = gradients[-1 - lag][lag * ctx.batch :]
            total = total + torch.cat([later, later.new_zeros(lag * ctx.batch, later.shape[1])])[: len(total)]
        return total, None


class _Unit(LayerFunction):
    """x rsqrt(fold(x²) / d + EPSILON / d) factor: of rows [rows, 1, d] fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        weight = x.new_full(x.shape[-1:], factor)
        y, scale = rms_norm_forward(x, weight, EPSILON / x.shape[-1])
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        return rms_norm_backward(gradients[0], x, weight, scale, 1, False)[0], None


class _Rule(LayerFunction):
    """The rule of whole sequences side by side: [s · b, heads, …]."""

    @staticmethod
    def forward(ctx: Any, batch: int, *numbers: Tensor) -> Tensor:
        ctx.save_for_backward(*numbers)
        ctx.batch = batch
        q, _, v = numbers[:3]
        states = v.new_empty(batch, *v.shape[1:], q.shape[-1])
        spans = [(n, len(v) // batch, n, 1) for n in range(batch)]
        return delta_rule(Numbers(*numbers), torch.tensor(spans, dtype=torch.int32, device=v.device), batch, states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        def by_token(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, ctx.batch)).flatten(1, 2)

        numbers: Sequence[Tensor] = ctx.saved_tensors
        results = delta_rule_backward(by_token(gradients[0]), Numbers(*map(by_token, numbers)))
        return None, *(result.reshape(number.shape) for result, number in zip(results, numbers, strict=True))
