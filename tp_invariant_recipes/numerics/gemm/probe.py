# SPDX-License-Identifier: Apache-2.0
"""Operands on which another order of additions shows: every exact result is 0, so an output holds nothing but rounding.

    a @ b = [X, X] @ [Y; -Y], with the columns of a and the rows of b permuted alike

On normal random numbers a bf16 output is the same for most orders: its 8 bits hide what the order changes in fp32.
With k cut in half, 128 x 16 x 128 showed no difference in 40 of 40 draws on an H200; here 19 to 89 % of the outputs
differ (tests/unit/numerics/gemm/test_product_probe.py repeats both on a CPU).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, Quantized

LARGE = 2.0**64  # a scale; its square is beyond fp32
SMALL = 2.0**-6  # of operands, whose sums times LARGE twice are within fp32
SPREAD = 4  # blocks differ by up to 2 ** (4 * SPREAD)


def within(a: Quantized, b: Quantized, generator: torch.Generator) -> None:
    """Fill both operands, of k alike. With an odd number at the end of k its last GEMM is zero."""
    k = a.data.shape[1]
    x, y = _normal(a, generator), _normal(b, generator)
    for start in range(0, k, BLOCK):
        size = min(BLOCK, k - start)
        order = start + torch.randperm(size, generator=generator, device=x.device)
        first, second = order[: size // 2], order[size // 2 : size // 2 * 2]
        x[:, second], y[:, second] = x[:, first], -y[:, first]
        x[:, order[size // 2 * 2 :]] = 0
    _fill(a, b, x, y, generator)


def across(a: Quantized, b: Quantized, generator: torch.Generator) -> None:
    """Fill both operands. Numbers that belong to no pair of whole blocks are zero."""
    blocks = a.data.shape[1] // BLOCK
    x, y = _normal(a, generator), _normal(b, generator)
    order = torch.randperm(blocks, generator=generator, device=x.device)
    pairs = blocks // 2
    powers = torch.linspace(-SPREAD, SPREAD, max(pairs, 1), device=x.device).round()
    for operand in (x, y):
        whole = operand[:, : blocks * BLOCK].view(len(operand), blocks, BLOCK)
        whole[:, order[:pairs]] *= torch.exp2(powers[:pairs])[:, None]
        whole[:, order[pairs : 2 * pairs]] = whole[:, order[:pairs]] * (1 if operand is x else -1)
        whole[:, order[2 * pairs :]] = 0
        operand[:, blocks * BLOCK :] = 0
    _fill(a, b, x, y, generator, lambda scale: _alike(scale, order, pairs))


def order(a: Quantized, b: Quantized, generator: torch.Generator) -> None:
    """Fill both operands."""
    _fill(a, b, _normal(a, generator) * SMALL, _normal(b, generator) * SMALL, generator)
    a.scale.fill_(LARGE)
    b.scale.fill_(LARGE)


DRAWS = (within, across, order)


def _normal(operand: Quantized, generator: torch.Generator) -> Tensor:
    return torch.randn(operand.data.shape, generator=generator, device=operand.data.device)


def _fill(
    a: Quantized,
    b: Quantized,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    change: Callable[[Tensor], object] = lambda scale: None,
) -> None:
    for operand, values in ((a, x), (b, y)):
        operand.data.copy_(values.to(operand.data.dtype))
        scale = torch.rand(operand.scale.shape, generator=generator, device=x.device) + 0.5
        if operand.blocks != "tensor":
            change(scale)
        operand.scale.copy_(scale)


def _alike(scale: Tensor, order: Tensor, pairs: int) -> None:
    """Give both blocks of a pair one scale."""
    scale[:, order[pairs : 2 * pairs]] = scale[:, order[:pairs]]


WIDE = 8  # powers of two, up and down, between positions


def cancelling(a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Fill both operands.

    a: [m, k]; b: [k, n], of a's dtype and device, any strides. With odd k one GEMM of each sum is zero.
    generator: of their device.
    """
    k = a.shape[1]
    half = k // 2
    x = torch.randn(a.shape[0], half, generator=generator, device=a.device).to(a.dtype)
    y = torch.randn(half, b.shape[1], generator=generator, device=b.device).to(b.dtype)
    order = torch.randperm(k, generator=generator, device=a.device)
    a.copy_(torch.cat([x, x, x.new_zeros(a.shape[0], k - 2 * half)], 1)[:, order])
    b.copy_(torch.cat([y, -y, y.new_zeros(k - 2 * half, b.shape[1])])[order])


def residue(out: Tensor, generator: torch.Generator) -> None:
    """Fill the output that a GEMM is added to, with numbers as small as a cancelling GEMM's rounding."""
    out.copy_(torch.randn(out.shape, generator=generator, device=out.device).mul_(2.0**-20))


def cancelling_attention(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, generator: torch.Generator, *, late: bool
) -> None:
    """Fill the operands of causal attention so that the output and all gradients are nothing but rounding.

    Positions are cut in two windows. Within a window, keys come in pairs with equal keys and opposite values, and
    queries in pairs with equal queries and opposite gradients, in random order. A query of the second window sees the
    first one, which cancels, and not its own: there a feature of query and key makes the score so low that its
    exponential is 0. (The first window sees itself, with gradients of 0.) So P·V and dS·K cancel over keys, and P^T·dO
    and dS^T·Q over queries. Pairs have magnitudes of their own: sums of equally large GEMMs of bf16 numbers are
    often exact.

    query: [s, b, h, d]; key: [s, b, g, d]; value: [s, b, g, v]; gradient: [s, b, h, v], all of one dtype and device.
    generator: of their device. late: whether the second window is the last eighth of the positions, for sums over
    many keys, or all but the first eighth, for sums over many queries. Several windows would hide where sums are cut
    at a window's end.
    """
    length, width = query.shape[0], query.shape[-1]
    cut = max(1, length * 7 // 8 if late else length // 8)
    low = 2.0 ** math.ceil(math.log2(256 * math.sqrt(width)) / 2)  # low² / sqrt(width) is at least 256
    for tensor in (query, key, value, gradient):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=tensor.device))
    for tensor in (value, gradient):
        exponents = torch.randint(-WIDE, WIDE + 1, (length, 1, 1, 1), generator=generator, device=tensor.device)
        tensor.mul_(exponents.exp2())
    for tensor in (query, key):
        tensor[..., :2] = 0
    for window, (start, stop) in enumerate(((0, cut), (cut, length))):
        query[start:stop, ..., window], key[start:stop, ..., window] = -low, low
        for same, opposite in ((key, value), (query, gradient)):
            order = start + torch.randperm(stop - start, generator=generator, device=query.device)
            half = len(order) // 2
            first, second = order[:half], order[half : 2 * half]
            same[second] = same[first]
            opposite[second] = -opposite[first]
            opposite[order[2 * half :]] = 0
    gradient[:cut] = 0


def cancelling_scores(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, generator: torch.Generator) -> None:
    """Fill the operands of attention so that the sums over features are nothing but rounding: Q·K^T and dO·V^T.

    Query and key are so large that this rounding is about 1, and changes the softmax.

    Shapes, dtype and generator as of `cancelling_attention`.
    """
    for first, second, scale in ((query, key, 2.0**12), (gradient, value, 1.0)):
        width = first.shape[-1]
        half = width // 2
        order = torch.randperm(width, generator=generator, device=first.device)
        for tensor, sign in ((first, 1), (second, -1)):
            x = torch.randn((*tensor.shape[:-1], half), generator=generator, device=tensor.device) * scale
            rest = x.new_zeros(*x.shape[:-1], width - 2 * half)
            tensor[..., order] = torch.cat([x, sign * x, rest], -1).to(tensor.dtype)
