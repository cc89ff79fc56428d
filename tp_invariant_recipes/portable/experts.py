"""Router and experts of numerics=portable: where those of tree have a library's arithmetic. bf16, on a CPU.

Routes, the exchange between ranks and the order in which a token's copies are added are those of tree
(numerics/layers/experts/token_dispatcher.py): they move bytes, and add in fp32 in the order of the experts' numbers.
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.numerics.layers.experts.experts import Activation
from tp_invariant_recipes.numerics.megatron.moe.moe_layer import InvariantSequentialMLP
from tp_invariant_recipes.numerics.megatron.moe.router import InvariantTopKRouter
from tp_invariant_recipes.numerics.products.defined import product
from tp_invariant_recipes.portable.ieee.router import route_tokens, route_tokens_backward
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

    products = staticmethod(product)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s/t, b, E] → probabilities and routing map, [n, E]."""
        if padding_mask is not None:
            raise NotImplementedError("a padding mask has no portable version")
        probs, scores, chosen = _Routing.apply(logits.view(-1, self.config.num_moe_experts), self.topk)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._apply_aux_loss(probs, scores, chosen)
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
