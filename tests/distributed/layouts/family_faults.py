"""Ingredients of families' layers, each left out in a run: INGREDIENTS says of which, and in which layouts it shows."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.distributed.faults import product_per_rank
from tests.distributed.layouts.families import AHEAD, NEXT_ALONE


@dataclass(frozen=True)
class Ingredient:
    """What is left out, of which model, and the layouts whose gradients then differ.

    forward: whether the first forward pass is as it was, so that the losses of step 1 are equal.
    """

    fault: Callable[[], None]
    model: str
    fixed: str
    layouts: tuple[str, str] = ("tp=1", "tp=2")
    forward: bool = True


def unshifted_backward() -> None:
    """Let the backward pass of a norm forget the 1 that its weight lacks."""
    from tp_invariant_recipes.numerics.layers import norm

    original = norm.Norm.backward

    def backward(self, *args):
        return original(self._replace(centred=False), *args)

    norm.Norm.backward = backward


def _bias_added_later() -> None:
    from tp_invariant_recipes.numerics.layers import norm

    norm.row_bias = lambda y, bias, mesh, sliced: y + bias


def _stocks_gate() -> None:
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    from tp_invariant_recipes.numerics.megatron.moe import moe_layer

    moe_layer.InvariantSharedExpertMLP.forward = SharedExpertMLP.forward


def _heads_of_a_rank() -> None:
    import torch

    from tp_invariant_recipes.numerics.megatron.attention import latent_attention

    def backward(ctx, *gradients):
        total = gradients[0].sum(2, keepdim=True)
        if ctx.mesh.size > 1:
            torch.distributed.all_reduce(total, group=ctx.mesh.group)
        return total, None, None

    latent_attention._Spread.backward = staticmethod(backward)


def _lookups_in_a_single_sum() -> None:
    """At pp=2 the two sums are on two ranks; at pp=1 one buffer then gets both in turns."""
    from tp_invariant_recipes.numerics.megatron import local

    local.InvariantVocabParallelEmbedding.ahead = property(lambda self: False, lambda self, value: None)


_BALANCED = f"gbs=1 {NEXT_ALONE} model.moe_aux_loss_coeff=1.0"
# The few tokens of a row of the vocabulary add up exactly in bf16, so lookups show in fp32.
_UNTIED = "model.share_embeddings_and_output_weights=false precision=fp32"
INGREDIENTS = {
    "a norm's bias needs its tree sum": Ingredient(_bias_added_later, "gpt", "gbs=2"),
    "the gate's gradient is a tree": Ingredient(_stocks_gate, "next", _BALANCED, forward=False),
    "products of chunks": Ingredient(product_per_rank, "deepseek", "numerics.virtual_shards=4"),
    "the shared key's gradient is a tree": Ingredient(_heads_of_a_rank, "deepseek", "numerics.virtual_shards=4"),
    "lookups of later tokens need a sum of their own": Ingredient(
        _lookups_in_a_single_sum, "qwen3", f"gbs=4 {AHEAD} {_UNTIED}", ("pp=1", "pp=2")
    ),
}
