# SPDX-License-Identifier: Apache-2.0
"""The kernels of FP8 products on CPU tensors, with every bit: for a process that Triton's interpreter runs in.

Its `tl.dot` becomes the accumulator of products/fp8_tiles.py. Where the kernel asks for that every 128 products, the
accumulator is added in fp32 to the one given: what a Hopper `tl.dot` does (tests/gpu/kernels/test_products_gpu.py).
"""

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.definitions.fp8_sum import KEPT_BITS, _accumulated, _split
from tests.fp8_operands import KINDS, TYPES, operands
from tests.operands import same_bits
from tests.unit.portable.attention_interpreted import fused, rounded_to_bf16
from tp_invariant_recipes.kernels.gemm import fp8_tiles
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.gemm import fp8

OF_TRITON = {"fp8e4nv": E4M3, "fp8e5": E5M2}


def as_a_tensor_core(kept):
    """A replacement for `create_dot`, that keeps so many bits."""

    def create_dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
        assert a.data.shape[1] == BLOCK, "one block"
        numbers = [
            _split(torch.from_numpy(np.ascontiguousarray(bits)).view(OF_TRITON[str(item.dtype.scalar)]))
            for item, bits in ((a, a.data), (b, b.data.T))
        ]
        (x, ex), (y, ey) = numbers
        rows, columns = (np.flatnonzero(item.any(1)) for item in (x, y))  # a tile is mostly beyond the edge
        p = np.zeros((len(x), len(y)), np.float32)
        p[np.ix_(rows, columns)] = _accumulated(x[rows], y[columns], ex[rows], ey[columns], kept)
        if max_num_imprecise_acc == BLOCK:
            p = accumulator.data + p
        else:
            assert not accumulator.data.any(), "one chain from zero"
        return TensorHandle(p, accumulator.dtype.scalar)

    return create_dot


def as_a_gpu(kept=KEPT_BITS):
    """Let the interpreter compute what a GPU's instructions do."""
    InterpreterBuilder.create_dot = as_a_tensor_core(kept)
    InterpreterBuilder.create_fma = fused
    InterpreterBuilder.create_fp_trunc = rounded_to_bf16


def differing(kept, kind, types, m, n, k):
    """The products of two matrices that have other bits by the kernel than on a CPU: forms of output and addition."""
    as_a_gpu(kept)
    a, b = operands(kind, m, n, k, types)
    results = []
    for dtype, add in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        out = torch.randn(n, m).t().to(dtype)
        expected = fp8.gemm(a, b, out.clone(), add=add)
        fp8_tiles.gemm(a, b, out, add)
        if not same_bits(out, expected):
            results.append((dtype, add))
    return results


def experts_differing(kind, sizes=(3, 0, 66, 7), n=70, k=256):
    """Forward products and weight gradients of experts, against those of a CPU."""
    as_a_gpu()
    groups, result = Groups(sizes, torch.tensor(sizes)), []
    whole, _ = operands(kind, sum(sizes), n, k, (E4M3, E4M3))
    per_group = torch.rand(len(sizes)) + 0.5
    x = Quantized(whole.data, per_group, "tensor") if kind == "tensor" else whole
    memory = torch.randn(2 * len(sizes), n, k).to(E4M3)
    weights = []
    for place in (5, 0, 3, 6):
        _, weight = operands(kind, 1, n, k, (E4M3, E4M3), seed=place)
        weights.append(Quantized(memory[place], weight.scale, weight.blocks))
    out, expected = torch.full((2, sum(sizes), n), 7.0, dtype=torch.bfloat16)
    fp8.grouped_gemm(x, weights, expected, groups)
    fp8_tiles.grouped_gemm(x, weights, out, groups)
    if not same_bits(out, expected):
        result.append("forward product")
    if kind == "128x128":
        return result
    sizes = sizes if kind == "tensor" else (128, 0, 128, 128)
    groups = Groups(sizes, torch.tensor(sizes))
    dy, x = operands(kind, 9, 33, sum(sizes), (E5M2, E4M3))
    if kind == "tensor":
        dy, x = Quantized(dy.data, per_group), Quantized(x.data, torch.rand(len(sizes)) + 0.5)
    outs = torch.randn(len(sizes), 9, 33)
    for chain in ((0,), (1, 0)):
        chained, correct = ([out.clone() for out in outs[:: len(chain)]] for _ in range(2))
        fp8.grouped_weight_gradient(dy, x, correct, groups, chain)
        fp8_tiles.grouped_weight_gradient(dy, x, chained, groups, chain)
        if not all(map(same_bits, chained, correct)):
            result.append(f"weight gradient, {chain}")
    return result


def all_differing():
    """All of the above that is short, as `interpreted.py` runs it: what differs."""
    results = []
    for kind, types in zip(KINDS, TYPES, strict=True):
        if differing(KEPT_BITS, kind, types, 5, 130, 256):
            results.append((kind, types))
        if experts_differing(kind):
            results.append(kind)
    if differing(KEPT_BITS, "tensor", (E4M3, E4M3), 130, 5, 200):
        results.append("a part of a block")
    return results
