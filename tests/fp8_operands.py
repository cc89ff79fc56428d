# SPDX-License-Identifier: Apache-2.0
"""Operands of FP8 products: normal numbers of magnitudes that differ, and scales of no power of two."""

from typing import NamedTuple

import numpy as np
import torch

from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized

KINDS = ("tensor", "1x128", "128x128")  # b's blocks; a's are 1x128 for both of blocks
TYPES = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))


def numbers(rows, k, dtype, seed=0):
    """[rows, k] of every magnitude, subnormal too, with zeros."""
    random = np.random.default_rng(seed)
    values = np.ldexp(random.standard_normal((rows, k)), random.integers(-7, 7, (rows, k)))
    return torch.from_numpy(np.where(random.random((rows, k)) < 0.05, 0, values)).to(dtype)


class Shape(NamedTuple):
    """Of one operand: its rows, the shape of its scales, and the name of their blocks."""

    rows: int
    scale: tuple[int, ...]
    blocks: str


def shapes(kind, m, n, k):
    """Of a [m, k] and b [n, k]."""
    of_k = -(-k // BLOCK)
    if kind == "tensor":
        return Shape(m, (), kind), Shape(n, (), kind)
    return Shape(m, (m, of_k), "1x128"), Shape(n, (n if kind == "1x128" else -(-n // BLOCK), of_k), kind)


def operands(kind, m, n, k, types, seed=0):
    """a [m, k] and b [n, k] of these types."""
    random = torch.Generator().manual_seed(seed)
    each = shapes(kind, m, n, k)
    scales = [torch.rand(x.scale, generator=random) + 0.5 for x in each]
    return tuple(
        Quantized(numbers(x.rows, k, dtype, 2 * seed + number), scale, x.blocks)
        for number, (x, dtype, scale) in enumerate(zip(each, types, scales, strict=True))
    )
