# SPDX-License-Identifier: Apache-2.0
"""The experts: GEMMs of each expert's tokens with its weights. An expert's owner computes the same GEMMs, of the
same shapes, in every layout (numerics/layers/experts/token_dispatcher.py), so any deterministic GEMM gives the same
bits. On a GPU they are defined GEMMs like all others, by kernels/gemm/grouped_gemm.py.

An owner has the tokens of several context shards, and with ep > tp of several data-parallel ranks: its sources. It
adds the weight gradients of those of an expert group one after the other (numerics/sums/expert_groups.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.function_modes import LayerFunction
from tp_invariant_recipes.kernels.activations import (
    Clamped,
    Kind,
    weighted_activation,
    weighted_activation_backward,
)
from tp_invariant_recipes.kernels.row_sums import folding_sum, token_sum
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats import Format
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum
from tp_invariant_recipes.numerics.sums.weight_gradient import (
    added_to_main_grad,
    gradients_of,
    main_grad_of,
    reduce_weight_gradient,
)


def token_gate(
    out: Tensor, x: Tensor, weight: Tensor, mesh: VirtualMesh, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
) -> Tensor:
    """out · sigmoid(x · w) in fp32, rounded once.

    out, x: [s/t, b, h], this rank's part of the sequence. weight: [1, h], whole on every rank.
    returns: out's shape and dtype.
    """
    return _TokenGate.apply(out, x, weight, mesh, sigmoid)


class _TokenGate(LayerFunction):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, weight: Tensor, mesh: VirtualMesh, sigmoid: Callable[[Tensor], Tensor]
    ) -> Tensor:
        sums = folding_sum(x.float() * weight.float(), -1)
        # A CPU's exp is another one for the last numbers of a tensor, which fill no vector: chunks have one shape.
        score = torch.cat([sigmoid(part) for part in sums.chunk(mesh.local_chunks)]).unsqueeze(-1)
        ctx.save_for_backward(out, x, weight, score)
        ctx.mesh = mesh
        return (out.float() * score).to(out.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        out, x, weight, score = ctx.saved_tensors
        dy = gradients[0].float()
        slope = folding_sum(dy * out.float(), -1).unsqueeze(-1) * score * (1.0 - score)
        leaves = token_sum((slope * x.float()).flatten(0, -2), ctx.mesh.local_chunks)
        dw = reduce_weight_gradient(weight, leaves, ctx.mesh, everywhere=False)
        return (dy * score).to(out.dtype), (slope * weight.float()).to(x.dtype), dw, None, None


Weights = Sequence[Tensor]
Adapter = Callable[[Tensor, Batches], Tensor]


def mark_separate(experts: torch.nn.Module) -> None:
    """Give these weights buffers and an optimizer apart from all else in every layout.

    Megatron does so where tp > 1 or ep > 1. At tp=1 ep=1 it would write one optimizer's state into a checkpoint, which
    no other layout reads (`ChainedOptimizer.sharded_state_dict` of Megatron-Core). The groups of ranks that
    reduce both are the same there.
    """
    for weight in experts.parameters():
        weight.allreduce = False  # type: ignore[attr-defined]
        # Of a bias Megatron would add the tensor-parallel ranks' gradients twice: they are data-parallel ranks here.
        weight.sequence_parallel = False  # type: ignore[attr-defined]


class Activation(NamedTuple):
    """Forward and backward pass of the experts' activation, as of kernels/activations.py."""

    forward: Callable[[Tensor, Tensor, Any], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]


ACTIVATION = Activation(weighted_activation, weighted_activation_backward)

SIGMOID = {"silu": 1.0, "quick_gelu": 1.702}  # gated activations -> the factor in their sigmoid


def activation_kind(config: Any) -> Kind | None:
    """Return the experts' activation in kernels/activations.py; None: that module lacks it."""
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    name, plain = config.activation_func.__name__, limit is None and not offset
    if name == "squared_relu" and plain and not config.gated_linear_unit:
        return "squared_relu"
    if name not in SIGMOID or not config.gated_linear_unit:
        return None
    if name == "silu" and plain:
        return "swiglu"
    return Clamped(SIGMOID[name], float("inf") if limit is None else float(limit), float(offset))


def expert_mlp(
    x: Tensor,
    probs: Tensor,
    batches: Batches,
    fc1: Weights,
    fc2: Weights,
    kind: Kind | None,
    operands: Format = PLAIN,
    activation: Activation = ACTIVATION,
    biases: tuple[Weights, Weights] | None = None,
    adapters: tuple[Adapter | None, Adapter | None] = (None, None),
) -> Tensor:
    """fc2(activation(fc1(x)) · probs), each row with its expert's weights.

    x: [r, h], in order of batches; probs: [r]. fc1: [f or 2f, h] per local expert; fc2: [h, f] per local expert.
    operands: what multiplies.
    biases: [f or 2f] and [h] per local expert; the second is added times the row's probability.
    adapters: of fc1 and fc2: what is added to a GEMM of these rows and batches.
    returns: [r, h].
    """
    if kind is None:
        raise NotImplementedError("of activations only SwiGLU and squared ReLU have an invariant version for experts")
    inner = _adapted(grouped_linear(x, batches, fc1, operands), x, batches, adapters[0])
    if biases is not None:
        inner = _GroupedBias.apply(inner, None, batches, *biases[0])
    weighted = _WeightedActivation.apply(inner, probs, kind, activation)
    y = _adapted(grouped_linear(weighted, batches, fc2, operands), weighted, batches, adapters[1])
    return y if biases is None else _GroupedBias.apply(y, probs, batches, *biases[1])


def _adapted(y: Tensor, x: Tensor, batches: Batches, adapter: Adapter | None) -> Tensor:
    return y if adapter is None else y + adapter(x, batches)


class _GroupedBias(LayerFunction):
    """y + bias · probs in fp32, rounded once; probs: None for 1. A bias' gradient is a tree over a batch's rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probs: Tensor | None, batches: Batches, *biases: Tensor) -> Tensor:
        ctx.save_for_backward(*((probs,) if probs is not None else ()), *biases)
        ctx.weighted, ctx.batches = probs is not None, batches
        return (y.float() + _of_rows(batches, biases, probs)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probs, biases = (ctx.saved_tensors[0], ctx.saved_tensors[1:]) if ctx.weighted else (None, ctx.saved_tensors)
        batches, dy, dp = ctx.batches, gradients[0].contiguous(), None
        if probs is not None:
            dp = folding_sum(dy.float() * _of_rows(batches, biases, None), -1).to(probs.dtype)
        bias_gradients: list[Tensor | None] = [None] * len(biases)
        if all(ctx.needs_input_grad[3:]):
            weighted = dy.float() if probs is None else dy.float() * probs.float().unsqueeze(1)
            bias_gradients = [*_bias_gradients(weighted, biases, batches)]
        return dy, dp, None, *bias_gradients


def _of_rows(batches: Batches, biases: Weights, probs: Tensor | None) -> Tensor:
    """[r, n] fp32: the bias of each row's expert, times its probability."""
    sizes = torch.tensor(batches.groups.sizes, device=biases[0].device)
    each = torch.stack([bias.float() for bias in of_batches(batches, biases)]).repeat_interleave(sizes, 0)
    return each if probs is None else each * probs.float().unsqueeze(1)


def _bias_gradients(dy: Tensor, biases: Weights, batches: Batches) -> list[Tensor]:
    """dy: [r, n] fp32. As `weight_gradients`."""
    rows = dy.split(batches.groups.sizes)

    def add(outs: list[Tensor]) -> None:
        for out, batch in batches.in_order(outs):
            if len(rows[batch]):
                out.add_(tree_sum(token_sum(rows[batch], 1)[0]))

    return weight_gradients(add, biases, batches, dy.device)


class _WeightedActivation(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, kind: Kind, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, probs)
        ctx.kind, ctx.activation = kind, activation
        return activation.forward(x, probs, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, probs = ctx.saved_tensors
        return *ctx.activation.backward(gradients[0].contiguous(), x, probs, ctx.kind), None, None


def grouped_linear(x: Tensor, batches: Batches, weights: Weights, operands: Format = PLAIN) -> Tensor:
    """x @ weight^T, each row with its expert's weight. x: [r, k] in order of batches; weights: [n, k] per expert."""
    return _GroupedLinear.apply(x, batches, operands.for_experts(*weights), *weights)


class _GroupedLinear(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, batches: Batches, operands: Format, *weights: Tensor) -> Tensor:
        rows, kept = operands.from_input(x.contiguous(), groups=batches.groups)
        ctx.save_for_backward(*weights, *kept)
        ctx.batches, ctx.operands = batches, operands
        across = of_batches(batches, operands.across(weights, forward=True))
        out = x.new_empty(len(x), weights[0].shape[0])
        return operands.multiply_groups(rows, across, out, batches.groups, forward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wants_dx, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        if any(wanted) and not all(wanted):
            raise NotImplementedError("either all of a layer's experts are trained or none")
        weights, kept = ctx.saved_tensors[: len(wanted)], ctx.saved_tensors[len(wanted) :]
        batches, operands, dy = ctx.batches, ctx.operands, gradients[0].contiguous()
        rows, columns = operands.from_gradient(dy, None, wants_dx, any(wanted), batches.groups)
        dx = None
        if wants_dx:
            across = of_batches(batches, operands.across(weights, forward=False))
            dx = dy.new_empty(len(dy), weights[0].shape[1])
            dx = operands.multiply_groups(rows, across, dx, batches.groups, forward=False)

        def add(outs: list[Tensor]) -> None:
            operands.add_gradients(columns, kept, outs, batches)

        dw = weight_gradients(add, weights, batches, dy.device) if any(wanted) else [None] * len(weights)
        return (dx, None, None, *dw)


def of_batches[T](batches: Batches, tensors: Sequence[T]) -> list[T]:
    """Of each batch what its expert has."""
    return [tensors[batches.expert(batch)] for batch in range(len(batches.groups.counts))]


def weight_gradients(
    add: Callable[[list[Tensor]], None], weights: Weights, batches: Batches, device: torch.device
) -> list[Tensor]:
    """Return the gradient that autograd gets for every local expert; zeros for experts that other ranks compute.

    add: adds to these fp32 tensors, one for each expert and buffer, the gradients of their batches.
    """
    if all([main_grad_of(weight) is None for weight in weights]):
        plain = torch.zeros(batches.buffers, len(weights), *weights[0].shape, dtype=torch.float32, device=device)
        add([plain[buffer, expert] for expert in batches.experts for buffer in range(batches.buffers)])
        return list(tree_sum(plain, weights[0].dtype))
    add([gradient for expert in batches.experts for gradient in gradients_of(weights[expert])])
    return [added_to_main_grad(weight) for weight in weights]
