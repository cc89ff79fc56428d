# SPDX-License-Identifier: Apache-2.0
"""The embedding's lookups, and the gradient of its weight: one order of additions for every tp and pp.

A row of the weight gradient is the sum of its tokens' gradients, one after the other in fp32: the micro-batches in
their order, and in each the tokens as [batch, sequence] has them. A rank adds to its own rows only, so tp does not
matter. torch would add the tokens of a micro-batch in bf16. Where a micro-batch is a leaf of the tree over data shards
(numerics/sums/data_shards.py), its tokens are added up before their sum is added to other leaves.

Where the output layer has the same weight (tied embeddings), the gradient is

    (the lookups, over all micro-batches) + (the output layer's, over all micro-batches)

each summed over all data shards before they are added.

    pp=1   one rank has both: main_grad holds the output layer's, `weight.lookup_gradient` the lookups', until both are
           summed over data-parallel ranks (numerics/megatron/data_parallel.py)
    pp>1   the first stage has the lookups', the last stage the output layer's; Megatron adds the two, after it has
           summed each over data-parallel ranks

Megatron adds the two in turns at pp=1, and what autograd gives it, which must be zeros then. `lookup` takes its mark
off the weight, so that it adds none. For autograd the lookups have a weight of their own: main_grad is complete when
the output layer's backward pass ends, so that `overlap_grad_reduce` reduces it under the layers'.

Where a rank has one data shard, and the gradients of its lookups take less memory than their sum, they wait until the
last backward pass has ended. The sum is made then, when there are no activations, and freed in the same step.

Lookups of MTP have a third sum, `weight.ahead_gradient`, on the last stage, which Megatron tells the
first. It is added to main_grad once complete, before the lookups of the main model.
"""

from functools import partial
from typing import Any

from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.row_sums import add_rows
from tp_invariant_recipes.numerics.sums.weight_gradient import (
    added_to_main_grad,
    is_leaf,
    main_grad_of,
    weight_gradient,
)

# Attributes of a weight: sums of lookups apart from main_grad, [contexts, rows, h] fp32.
LOOKUPS, AHEAD = "lookup_gradient", "ahead_gradient"
TIED, MARK = "is_tied", "zero_out_wgrad"  # whether the output layer has the weight; Megatron's word for that
# Backward passes of a step, if all are of one data shard; and by the sum's name the lookups that wait to be added.
PASSES, WAITING = "backward_passes", "waiting_lookups"


def lookup(weight: Tensor, ids: Tensor, elsewhere: Tensor | None, contexts: int = 1, *, ahead: bool = False) -> Tensor:
    """weight[ids], and zeros for the tokens whose rows other ranks have.

    weight: [rows, h]; ids: [b, s] int64, rows of `weight`; elsewhere: [b, s] bool, ids of no row here; None: none.
    contexts: context shards that s consists of. ahead: whether the lookup is one of MTP.
    returns: [b, s, h] of weight's dtype.
    """
    if getattr(weight, MARK, False):
        setattr(weight, TIED, True)
        setattr(weight, MARK, False)
    known = ids if elsewhere is None else ids.masked_fill(elsewhere, -1)
    fsdp = hasattr(weight, "get_main_grad")  # its hooks on the weight wait for both
    apart = getattr(weight, TIED, False) and not (ahead or fsdp) and main_grad_of(weight) is not None
    of_autograd = weight.detach().requires_grad_(weight.requires_grad) if apart else weight
    return _Lookup.apply(of_autograd, (weight,), known, elsewhere, contexts, ahead)


class _Lookup(LayerFunction):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, owner: tuple[Tensor], ids: Tensor, elsewhere: Any, contexts: int, ahead: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.owner, ctx.contexts, ctx.ahead = owner, contexts, ahead
        if elsewhere is None:
            return weight[ids]
        return weight[ids.clamp(min=0)].masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (weight,), (ids,) = ctx.owner, ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        parts = zip(gradients[0].chunk(ctx.contexts, 1), ids.chunk(ctx.contexts, 1), strict=True)
        looked_up = [(rows.reshape(-1, weight.shape[1]).contiguous(), at.reshape(-1)) for rows, at in parts]
        ahead = ctx.ahead and main_grad_of(weight) is not None
        # The output layer's gradient goes to the same buffer: Megatron marks such a weight at pp=1.
        if ahead or (getattr(weight, TIED, False) and main_grad_of(weight) is not None):
            name, passes = AHEAD if ahead else LOOKUPS, getattr(weight, PASSES, 0)
            if passes and passes * ids.numel() <= weight.shape[0] and getattr(weight, name, None) is None:
                # A CUDA graph of a layer overwrites the gradient.
                waiting = weight.__dict__.setdefault(WAITING, {}).setdefault(name, [])
                waiting.append([(rows.clone(), at) for rows, at in looked_up])
            else:
                _add_apart(weight, name, looked_up)
            # Without `ahead` autograd has another stand-in for this weight: the output layer's, or that of `ahead`.
            return (added_to_main_grad(weight) if ahead else None), None, None, None, None, None
        gradient = weight_gradient(weight, *(partial(_add, weight, *lookups) for lookups in looked_up))
        return gradient, None, None, None, None, None


def _add(weight: Tensor, rows: Tensor, at: Tensor, out: Tensor, add: bool) -> None:
    add_rows(rows, at, out if add else out.zero_(), at_once=is_leaf(weight))


def _add_apart(weight: Any, name: str, looked_up: list[tuple[Tensor, Tensor]]) -> None:
    """Add a micro-batch's gradients to a sum apart from main_grad: [contexts, rows, h] fp32."""
    if getattr(weight, name, None) is None:
        setattr(weight, name, weight.main_grad.new_zeros(len(looked_up), *weight.main_grad.shape))
    for (rows, at), out in zip(looked_up, getattr(weight, name), strict=True):
        add_rows(rows, at, out, at_once=is_leaf(weight))


def sums_of_their_own(weight: Any) -> list[Tensor]:
    """Return what `lookup` has added apart from main_grad, in the order in which it is to be added there."""
    for name, waiting in getattr(weight, WAITING, {}).items():
        while waiting:
            _add_apart(weight, name, waiting.pop(0))
    return [kept for name in (AHEAD, LOOKUPS) if (kept := getattr(weight, name, None)) is not None]


def begin_step(weight: Any) -> None:
    """Clear the sums of `sums_of_their_own`: free them where they are made at the end of a step."""
    for name, kept in ((name, getattr(weight, name, None)) for name in (AHEAD, LOOKUPS)):
        if name in getattr(weight, WAITING, {}):
            setattr(weight, name, None)
        elif kept is not None:
            kept.zero_()
