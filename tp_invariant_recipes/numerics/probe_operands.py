"""Operands on which another order of additions shows: every exact result is 0, so an output holds nothing but rounding.

    a @ b = [X, X] @ [Y; -Y], with the columns of a and the rows of b permuted alike

On normal random numbers a bf16 output is the same for most orders: its 8 bits hide what the order changes in fp32.
With k cut in half, 128 x 16 x 128 showed no difference in 40 of 40 draws on an H200; here 19 to 89 % of the outputs
differ (tests/unit/test_product_probe.py repeats both on a CPU).
"""

import torch
from torch import Tensor


def cancelling(a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Fill both operands.

    a: [m, k]; b: [k, n], of a's dtype and device, any strides. With odd k one product of each sum is zero.
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
    """Fill the output that a product is added to, with numbers as small as a cancelling product's rounding."""
    out.copy_(torch.randn(out.shape, generator=generator, device=out.device).mul_(2.0**-20))
