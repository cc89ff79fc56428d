"""exp, log, sigmoid, rsqrt and exp2 of many numbers, for a check at the start of a run."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.math import canonical, exp, exp2, log, rsqrt, sigmoid
from tp_invariant_recipes.portable.shared_source import UNFUSED, as_array, numba_version

BLOCK = 512

_exp, _log, _sigmoid, _rsqrt, _exp2, _canonical = (
    numba_version(function.__name__) for function in (exp, log, sigmoid, rsqrt, exp2, canonical)
)


def values(x: Tensor) -> Tensor:
    """[n] fp32 → [5, n], every NaN canonical; on x's device."""
    out = torch.empty(5, x.numel(), device=x.device)
    if x.is_cuda:
        values_triton(x, out)
    else:
        _fill(as_array(x), as_array(out))
    return out


@cpu_loop
def _fill(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[0, i], out[1, i] = _canonical(_exp(x[i])), _canonical(_log(x[i]))
        out[2, i], out[3, i] = _canonical(_sigmoid(x[i])), _canonical(_rsqrt(x[i]))
        out[4, i] = _canonical(_exp2(x[i]))


def values_triton(x: Tensor, out: Tensor) -> None:
    """Fill out. Both contiguous; Triton's interpreter takes CPU tensors."""
    SAMPLES.launch((triton.cdiv(x.numel(), BLOCK), 1), (x, out), (x.numel(),), (BLOCK,))


@triton.jit(do_not_specialize=["size"])
def _ieee_samples(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(x + at, mask=inside, other=0.0)
    tl.store(out + at, canonical(exp(number)), mask=inside)
    tl.store(out + size + at, canonical(log(number)), mask=inside)
    tl.store(out + 2 * size + at, canonical(sigmoid(number)), mask=inside)
    tl.store(out + 3 * size + at, canonical(rsqrt(number)), mask=inside)
    tl.store(out + 4 * size + at, canonical(exp2(number)), mask=inside)


SAMPLES = Kernel(_ieee_samples, **UNFUSED)
