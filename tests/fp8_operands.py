"""Operands of FP8 products: normal numbers of magnitudes that differ, and scales of no power of two."""

import numpy as np
import torch

from tp_invariant_recipes.kernels.products.quantize import BLOCK, E4M3, E5M2, Quantized

KINDS = ("tensor", "1x128", "128x128")  # b's blocks; a's are 1x128 for both of blocks
TYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))


def numbers(rows, k, dtype, seed=0):
    """[rows, k] of every magnitude, subnormal too, with zeros."""
    random = np.random.default_rng(seed)
    values = np.ldexp(random.standard_normal((rows, k)), random.integers(-7, 7, (rows, k)))
    return torch.from_numpy(np.where(random.random((rows, k)) < 0.05, 0, values)).to(dtype)


def operands(kind, m, n, k, types, seed=0):
    """a [m, k] and b [n, k] of these types."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-k // BLOCK)
    shapes = {
        "tensor": ((), ()),
        "1x128": ((m, blocks), (n, blocks)),
        "128x128": ((m, blocks), (-(-n // BLOCK), blocks)),
    }
    scales = [torch.rand(shape, generator=random) + 0.5 for shape in shapes[kind]]
    return tuple(
        Quantized(numbers(rows, k, dtype, 2 * seed + number), scale, blocks)
        for number, (rows, dtype, scale, blocks) in enumerate(
            zip((m, n), types, scales, ("1x128" if kind != "tensor" else kind, kind), strict=True)
        )
    )
