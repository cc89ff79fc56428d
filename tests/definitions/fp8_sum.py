# SPDX-License-Identifier: Apache-2.0
"""The product that kernels/gemm/fp8_tiles.py defines, in numpy: a step at a time, as its text says it."""

import numpy as np
import torch
from numpy.typing import NDArray

from tests.definitions.tensor_core_sum import NO_EXPONENT, fma
from tp_invariant_recipes.kernels.gemm.fp8_tiles import KEPT_BITS, LEAST, PROMOTED, STEP, kind
from tp_invariant_recipes.kernels.gemm.quantize import Quantized
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import NAN

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


def fp8_product(a: Quantized, b: Quantized, *, kept: int = KEPT_BITS, promoted: int = PROMOTED) -> F32:
    """a @ b^T by the definition above.

    a, b:     [m, k] and [n, k] on the CPU, of scales that `kind` accepts.
    kept, promoted: other arithmetic, for the controls of tests; a `promoted` of k is fast accumulation.
    returns:  [m, n] fp32.
    """
    blocks = kind(a, b)
    (x, ex), (y, ey) = _split(a.data), _split(b.data)
    sa, sb = (item.scale.numpy() for item in (a, b))
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
