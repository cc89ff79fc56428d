# SPDX-License-Identifier: Apache-2.0
"""Computes a sampled GEMM again, on a CPU, and counts the bits that differ (docs/guard.md)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.numerics.gemm.defined import by_fixed_tile_gemm
from tp_invariant_recipes.numerics.gemm.operands import WORDS, every_part, without_gaps
from tp_invariant_recipes.numerics.gemm.probe import cancelling
from tp_invariant_recipes.numerics.gemm.sampling import DEFINED, REPEATED, Sample


@dataclass(frozen=True)
class UnlikeBits:
    """How two results of one operation differ. outputs, elements: unlike ones, and all; bits: unlike bits."""

    outputs: int
    elements: int
    bits: int


def expected(sample: Sample) -> Tensor:
    """Return what the sample's result must be: [nodes, n, m] of its dtype, on the CPU where the sample is.

    kernels/gemm/segmented_k_gemm.py defines a GEMM of DEFINED; one of LIBRARY is the same call on the same
    shape.
    """
    if sample.kind == REPEATED:
        return sample.a[None]
    assert sample.b is not None
    gemm = _defined if sample.kind == DEFINED else _library
    total = sample.before
    if sample.chained and total is not None:
        for (part,) in every_part(sample.segments, 1):
            total = total + gemm(sample.a[:, part], sample.b[part])
        return total[None]
    terms: list[Tensor] = []
    for parts in every_part(sample.segments, sample.shards):
        term = None
        for part in parts:
            summand = gemm(sample.a[:, part], sample.b[part])
            term = summand if term is None else term + summand
        assert term is not None
        terms.append(term)
    while len(terms) > len(sample.out):
        terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]
    total = torch.stack(terms)
    if sample.before is not None:
        total = total.to(sample.before.dtype) + sample.before
    return total.to(sample.out.dtype)


def require_definition(device: torch.device) -> None:
    """Raise RunError: GEMMs of this device, if it is a GPU, are not those that a CPU computes by the definition."""
    if device.type != "cuda":
        return
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator(device).manual_seed(0)
        a, b = (torch.empty(shape, dtype=dtype, device=device) for shape in ((16, 512), (512, 16)))
        cancelling(a, b, generator)
        out = torch.empty(16, 16, device=device)
        by_fixed_tile_gemm(a, b, out, False)
        if difference(out.cpu(), _defined(a.cpu(), b.cpu())) is not None:
            raise RunError(
                f"guard: fixed tiles of {dtype} on this GPU are not bitwise identical to the definition of "
                "docs/arithmetic.md, by which the host judges samples: the GPU adds in another order than a "
                "Hopper does, or it is faulty; guard=off"
            )


def difference(first: Tensor, other: Tensor) -> UnlikeBits | None:
    """How two tensors of one shape and dtype differ; None: in no bit. A NaN is like any other."""
    word = WORDS[first.element_size()]
    unlike = first.contiguous().view(word) ^ other.contiguous().view(word)
    unlike = torch.where(first.isnan() & other.isnan(), torch.zeros_like(unlike), unlike)
    wrong = unlike[unlike != 0]
    if not len(wrong):
        return None
    bits = sum(byte.bit_count() for byte in wrong.view(torch.uint8).tolist())
    return UnlikeBits(len(wrong), first.numel(), bits)


def _defined(a: Tensor, b: Tensor) -> Tensor:
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu  # loads numba

    return tensor_core_cpu.gemm(a, b)


def _library(a: Tensor, b: Tensor) -> Tensor:
    wide = a.dtype if a.dtype in (torch.float32, torch.float64) else torch.float32
    return torch.mm(without_gaps(a.to(wide)), without_gaps(b.to(wide)))
