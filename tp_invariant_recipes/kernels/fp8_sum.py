"""`fp8 tiles 1`: what a product of two FP8 matrices is, as Hopper's tensor cores and cuBLAS compute it.

out = a @ b^T. k is walked in blocks of 128, each block in steps of 32; numbers beyond the end of k are zeros. A step
adds 32 products and the block's accumulator p, which starts at +0:

    exponent(x)  floor(log2 |x|); a subnormal FP8 number has the exponent of the smallest normal one (-6 in e4m3, -14 in
                 e5m2)
    top          the largest of: exponent(a) + exponent(b) of every product that is not zero, with the product itself
                 not normalised; the exponent of the accumulator, unless it is zero
    each of the 33 terms is cut toward zero to a multiple of 2 ** (top - 13); the cut terms are added exactly
    the sum is cut toward zero to 13 bits after its leading one: the new accumulator

A sum that is cut to zero is +0. A product with a NaN, of zero and infinity, or infinities of both signs make NaN, and
nothing changes it.

The block's accumulator enters `main`, fp32 and +0 at first, by IEEE arithmetic in fp32; every operation here is rounded
to nearest even, once:

    one scale a tensor    main = main + p;                            at the end  main * (scale_a * scale_b)
    1x128 by 1x128        main = fma(p * scale_a, scale_b, main)
    1x128 by 128x128      main = fma(p, scale_a * scale_b, main)

That is the fp32 output. A bf16 output is the fp32 output rounded to nearest even. A product that is added to an fp32
output is the fp32 output and one IEEE addition. Every NaN is NAN, in bf16 BF16_NAN.

Operands: e4m3 by e4m3, e5m2 by e4m3, e4m3 by e5m2. No library multiplies e5m2 by e5m2 on Hopper.

Evidence: tests/data holds what cuBLAS gave on an H200 and an H100; tests/unit/test_fp8_sum.py compares every bit.
cuBLAS also has "fast accumulation": one accumulator over all of k. No product of ours uses it.

This module states the definition in numpy. kernels/cpu/fp8_cpu.py computes it fast.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tp_invariant_recipes.kernels.quantized import E4M3, E5M2, Quantized
from tp_invariant_recipes.kernels.tensor_core_sum import NAN, fma

STEP = 32  # products added at once
KEPT = 13  # bits kept below the largest exponent, and below the leading one of an accumulator
PROMOTED = 128  # products of an accumulator, before it enters `main`
LEAST = {E4M3: -6, E5M2: -14}  # exponent of the smallest normal number, and of subnormal ones
NO_EXPONENT = -(2**20)  # below every exponent: of a zero

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


def fp8_product(a: Quantized, b: Quantized, *, kept: int = KEPT, promoted: int = PROMOTED) -> F32:
    """a @ b^T by the definition above.

    a, b:     [m, k] and [n, k] on the CPU, of scales that `kind` accepts.
    kept, promoted: other arithmetic, for the controls of tests; a `promoted` of k is fast accumulation.
    returns:  [m, n] fp32.
    """
    blocks = kind(a, b)
    (x, ex), (y, ey) = _split(a.data), _split(b.data)
    sa, sb = (one.scale.numpy() for one in (a, b))
    main = np.zeros((len(x), len(y)), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, x.shape[1], promoted):
            part, q = slice(start, start + promoted), start // PROMOTED
            p = _accumulated(x[:, part], y[:, part], ex[:, part], ey[:, part], kept)
            if blocks == "tensor":
                main = main + p
            elif blocks == "1x128":
                main = fma(p * sa[:, q, None], sb[None, :, q], main)
            else:
                main = fma(p, sa[:, q, None] * np.repeat(sb[:, q], PROMOTED)[None, : len(y)], main)
        if blocks == "tensor":
            main = main * (sa.reshape(()) * sb.reshape(()))
    return np.where(np.isnan(main), np.uint32(NAN).view(np.float32), main)


def kind(a: Quantized, b: Quantized) -> str:
    """The blocks of b, which name the products: "tensor", "1x128" or "128x128".

    raises TypeError: scales or types that no product is defined for; ValueError: k differs.
    """
    pair = a.blocks, b.blocks
    if pair not in (("tensor", "tensor"), ("1x128", "1x128"), ("1x128", "128x128")):
        raise TypeError(f"FP8 scales of {pair[0]} by {pair[1]}; tensor by tensor, 1x128 by 1x128, 1x128 by 128x128")
    if a.data.dtype == b.data.dtype == E5M2:
        raise TypeError("a product of e5m2 and e5m2, which Hopper's libraries do not compute; one must be e4m3")
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(f"a product of {[*a.data.shape]} and {[*b.data.shape]}^T")
    return b.blocks


def _split(data: torch.Tensor) -> tuple[F64, NDArray[np.int64]]:
    """Values and exponents."""
    values = data.double().numpy()
    return values, np.where(values == 0, NO_EXPONENT, np.maximum(_exponent(values), LEAST[data.dtype]))


def _exponent(x: F64) -> NDArray[np.int64]:
    """floor(log2 |x|); of a zero NO_EXPONENT."""
    finite = np.where(np.isfinite(x), x, 0)
    return np.where(finite == 0, NO_EXPONENT, np.frexp(finite)[1].astype(np.int64) - 1)


def _accumulated(x: F64, y: F64, ex: NDArray, ey: NDArray, kept: int) -> F32:
    """The accumulator over all k of x [m, k] and y [n, k], whose exponents are ex and ey."""
    total = np.zeros((len(x), len(y)))
    for start in range(0, x.shape[1], STEP):
        part = slice(start, start + STEP)
        total = _step(total, x[:, None, part], y[None, :, part], ex[:, None, part] + ey[None, :, part], kept)
    return total.astype(np.float32)


def _step(total: F64, x: F64, y: F64, exponents: NDArray, kept: int) -> F64:
    """total: [m, n]; x: [m, 1, step], y: [1, n, step], exponents: [m, n, step]. fp64 holds every number exactly."""
    products = x * y
    top = np.maximum(exponents.max(-1), _exponent(total))
    unit = np.where(top > NO_EXPONENT // 2, np.ldexp(1.0, np.maximum(top, -60) - kept), 1.0)
    finite = np.isfinite(products).all(-1) & np.isfinite(total)
    sums = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(total / unit)
    last = np.ldexp(1.0, np.maximum(_exponent(sums), 0) - kept)
    cut = np.trunc(sums / last) * last * unit
    return np.where(finite, cut + 0.0, products.sum(-1) + total)  # + 0.0: a zero is +0
