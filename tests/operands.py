# SPDX-License-Identifier: Apache-2.0
"""Operands that show how something is rounded and added, and the one comparison of bits.

Normal, widely scaled, cancelling and special numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

KINDS = ("normal", "wide", "cancelling", "special")
ATTENTION_KINDS = ("normal", "wide", "cancelling", "special", "tiny", "zeros", "opposite")
SPECIAL = np.array(
    [
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
        0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0x3F800000, 0xBF800000, 0x42B17218, 0xC2CE8ED0, 0x34000000,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip
EVERY_BF16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def sample(kind, *shape, dtype=torch.float32, seed=0):
    """A tensor of this kind; the same for the same arguments."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        values = np.ldexp(values, random.integers(-12, 13, shape)).astype(np.float32)
    if kind == "cancelling":
        half = values.shape[-1] // 2
        values[..., half : 2 * half] = -values[..., :half][..., random.permutation(half)]
    if kind == "special":
        there = random.random(shape) < 0.01
        values = np.where(there, SPECIAL[random.integers(0, len(SPECIAL), shape)], values)
    return torch.from_numpy(values).to(dtype)


def normal(*shape, seed=0, scale=1.0, dtype=torch.float32):
    """Normal numbers; the same for the same arguments."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def any_bits(count, seed=0):
    """fp32 numbers of any bits."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def finite_operands(s, b, h, g, d, kind):
    """query, key, value and the gradient of the output, bf16 and finite."""
    kinds = {"tiny": "normal", "zeros": "normal", "opposite": "wide"}.get(kind, kind)
    shapes = (s, b, h, d), (s, b, g, d), (s, b, g, d), (s, b, h, d)
    tensors = [sample(kinds, *shape, dtype=torch.bfloat16, seed=seed) for seed, shape in enumerate(shapes)]
    tensors = [torch.where(x.isfinite() & (x.abs() < 2**40), x, torch.zeros_like(x)) for x in tensors]
    if kind == "tiny":  # subnormal products
        tensors = [x * 2.0**-70 for x in tensors]
    if kind == "zeros":  # of both signs, whole heads of them too
        tensors = [torch.where(x.abs() < 0.5, x * 0, x) for x in tensors]
        tensors[0][..., 0, :] = -0.0
        tensors[3][..., 0, :] = 0.0
    if kind == "opposite":  # sums over keys, queries and heads of numbers that cancel: an order shows in bf16
        query, key, value, gradient = tensors
        half = s // 2
        value[half : 2 * half] = -value[:half].flip(0)
        gradient[half : 2 * half] = -gradient[:half].flip(0)
        query, key = 0.01 * query.clamp(-4, 4), 0.01 * key.clamp(-4, 4)
        if h // g > 2:
            gradient[:, :, 0] *= 2.0**16
            query[:, :, 2], gradient[:, :, 2] = query[:, :, 0], -gradient[:, :, 0]
        tensors = [query, key, value, gradient]
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits: a NaN equals the same NaN only, and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch, and the loops that follow it, compute in so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
