"""FP8 operands on which another order of additions shows, as numerics/products/probe.py has them for bf16.

    within    pairs of opposite products inside every block of 128, in any order: what the tensor core cuts remains
    across    pairs of opposite blocks, of very different magnitudes, in any order: what `main` rounds remains
    order     the scales' product overflows, and a block's sum times one after the other does not

tests/unit/kernels/products/test_fp8_products.py shows which other arithmetic each of them reveals.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.products.quantized import BLOCK, Quantized

LARGE = 2.0**64  # a scale; its square is beyond fp32
SMALL = 2.0**-6  # of operands, whose sums times LARGE twice are within fp32
SPREAD = 4  # blocks differ by up to 2 ** (4 * SPREAD)


def within(a: Quantized, b: Quantized, generator: torch.Generator) -> None:
    """Fill both operands, of k alike. With an odd number at the end of k its last product is zero."""
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
