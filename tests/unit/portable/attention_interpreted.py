# SPDX-License-Identifier: Apache-2.0
"""The attention for GPUs on CPU tensors against its form for a CPU: for a process that Triton's interpreter runs in.

The interpreter cannot multiply bf16. Here its `tl.dot` is the sum of tensor_core_sum.py, which goes on from the
accumulator it is given: what an H200's `tl.dot` was seen to do (tests/data). The interpreter's FMA rounds twice and
its conversion to bf16 cuts: both are replaced by what a GPU's instructions do.
"""

from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.definitions.elementwise import numpy_version
from tests.definitions.tensor_core_sum import fma
from tests.operands import finite_operands, same_bits
from tests.unit.portable import test_ieee_attention
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.portable.ieee import cached_attention
from tp_invariant_recipes.portable.ieee.attention import attention_backward, attention_forward

ROUND = numpy_version("bf16_bits")
NAMES = ("out", "top", "inverse", "dq", "dk", "dv")


def as_a_tensor_core(kept):
    """A replacement for `create_dot`, that keeps so many bits."""

    def create_dot(self, a, b, accumulator, input_precision, max_num_imprecise_acc):
        assert a.data.dtype == b.data.dtype == np.uint16, "bits of bf16"
        assert a.data.shape[1] % tensor_core_cpu.STEP == 0, "whole steps"
        rows, panels = tensor_core_cpu.split_rows(a.data), tensor_core_cpu.split_panels(b.data)
        panels[1][panels[0] == 0] = tensor_core_cpu.NO_EXPONENT  # also above a column's first number: it adds to a sum
        m, n = accumulator.data.shape
        out = np.zeros((1, m, panels[0].shape[0] * tensor_core_cpu.WIDE), np.float32)
        out[0, :, :n] = accumulator.data
        for panel, operand in enumerate(zip(*panels, strict=True)):
            column = panel * tensor_core_cpu.WIDE
            tensor_core_cpu.add_steps(out[0], column, *rows, 0, *operand, (0, 0, 0, 0, n - column), np.int32(kept))
        return TensorHandle(np.ascontiguousarray(out[0, :, :n]), accumulator.dtype.scalar)

    return create_dot


def fused(self, a, b, c):
    return TensorHandle(fma(a.data, b.data, c.data), c.dtype.scalar)


def rounded_to_bf16(self, source, target):
    assert source.dtype.scalar == tl.float32
    assert target.scalar == tl.bfloat16
    return TensorHandle(ROUND(source.data).astype(np.uint16), tl.bfloat16)


def interpret_as_a_gpu(kept):
    InterpreterBuilder.create_dot = as_a_tensor_core(kept)
    InterpreterBuilder.create_fma, InterpreterBuilder.create_fp_trunc = fused, rounded_to_bf16


def cached_rows_are_their_twins(kept, size, chunks, heads, groups, d):
    """Whether the kernel for cached keys, and the one that stores them, have the bits of the form for a CPU."""
    interpret_as_a_gpu(kept)
    sequences = test_ieee_attention.operands(heads, groups, d)
    most = cached_attention.rows_of_tile(heads // groups, max(chunks))
    operands = *test_ieee_attention.laid_out(sequences, size, chunks, longest=most)[:4], 0.25
    key, slots = torch.randn(5, groups, d).bfloat16(), torch.tensor([3, 9, 0, 30, 2])
    results = []
    for on_gpu in (False, True):
        stored = torch.zeros(2, *operands[1].shape).bfloat16()
        with patch.object(torch.Tensor, "is_cuda", on_gpu):
            cached_attention.store_keys(key, -key, *stored, slots)
            results.append((stored, cached_attention.cached_attention(*operands)))
    (stored, result), (expected, twin) = results
    assert same_bits(stored, expected)
    return same_bits(result, twin)


def differing_from_twin(kept, s, b, h, g, d, kind):
    """The names of the tensors with other bits."""
    gradient, *operands = (tensors := finite_operands(s, b, h, g, d, kind))[3], *tensors[:3]
    scale = float(np.float32(d**-0.5))
    attended = attention_forward(*operands, scale)
    interpret_as_a_gpu(kept)
    results = []
    for on_gpu in (False, True):
        with patch.object(torch.Tensor, "is_cuda", on_gpu):
            grads = attention_backward(gradient, *operands, attended, scale)
            results.append((*attention_forward(*operands, scale), *grads))
    twins, others = results
    assert all(x.isfinite().all() for x in twins)
    return [name for name, x, y in zip(NAMES, twins, others, strict=True) if not same_bits(x, y)]
