# SPDX-License-Identifier: Apache-2.0
"""exp, exp2, log, sigmoid and rsqrt in IEEE fp32: every operation is rounded once, and only exp2 has fused ones.

So a CPU, a Hopper and a Blackwell give the same bits, as no library's functions do. The largest errors found, in ULP of
fp32 (tests/unit/portable/test_ieee_math.py: every bf16 number, and 10^6 others against mpmath):

    exp 0.68    exp2 0.79    log 0.82    sigmoid 0.65    rsqrt 0.86        subnormal results of exp and sigmoid: 0.76

A NaN makes a NaN, of any bits; `canonical` gives it those that CUDA's operations make, 7fffffff. Kernels store no
other NaN.

exp     x = n ln2 + r with |r| <= ln2 / 2. n ln2 is taken off in two parts (Cody and Waite): the first has 9 bits, so
        that its product with n and the difference are exact. e^r is kept as the sum of two fp32 numbers and rounded
        only after that. 2^n is made of bits, in two factors, so that the product with a small n still rounds once.
exp2    x = n + f with |f| <= 1/2, exactly; 2^f is a polynomial of fused multiply-adds, and 2^n is made of bits.
        Thirteen instructions: attention consists of little else.
log     x = 2^k m with m from sqrt(1/2) to sqrt(2), and log(m) by s = (m - 1) / (m + 1), as FreeBSD's e_logf.c has it.
sigmoid e^-|x| stays in two parts. A quotient cut to 12 bits times a divisor cut to 12 bits is exact; so the remainder
        is known exactly, and corrects the quotient.
rsqrt   sqrt(1 / x), in this order: the root halves the error of the quotient. Very large and small x are scaled.
"""

from typing import Any

import triton
import triton.language as tl
from numba import njit

from tp_invariant_recipes.portable.shared_source import at_least, bits_of, constant, elementwise, fma, fp32_of


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n > 0."""
    return 1 << (n - 1).bit_length()


@triton.jit
def fold_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] → [ROWS]; COLUMNS is a power of two. A sum of two numbers has no order."""
    LEVELS: tl.constexpr = COLUMNS.bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS >> (level + 1)]), 1)
    return tl.reshape(x, [ROWS])


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] → [COLUMNS]; ROWS is a power of two."""
    LEVELS: tl.constexpr = ROWS.bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [2, ROWS >> (level + 1), COLUMNS]), 0)
    return tl.reshape(x, [COLUMNS])


@njit(nogil=True, error_model="numpy")
def numba_fold(values: Any) -> Any:
    """[n] fp32, n a power of two → the sum. The upper half stays as it is, what lies below it does not."""
    n = values.size
    while n > 1:
        n //= 2
        low, high = values[:n], values[n : 2 * n]
        for i in range(n):
            low[i] += high[i]
    return values[0]


@njit(nogil=True, error_model="numpy")
def numba_fold_rows(values: Any) -> Any:
    """[n, columns] fp32, n a power of two → its first row, which then has the sum."""
    n = values.shape[0]
    while n > 1:
        n //= 2
        for i in range(n):
            low, high = values[i], values[i + n]
            for j in range(low.size):
                low[j] += high[j]
    return values[0]


NAN_BITS, BF16_NAN = constant(0x7FFFFFFF), constant(0x7FFF)
QUIET_NAN = constant(0x7FC00000)
INFINITY, MINUS_INFINITY = (constant(float(name)) for name in ("inf", "-inf"))
ZERO, HALF, ONE_FP32, TWO = (constant(value) for value in (0.0, 0.5, 1.0, 2.0))
TWO_12, TWO_24, TWO_25 = (constant(2.0**n) for n in (12, 24, 25))
TWO_M12, TWO_M24, TWO_M100 = (constant(2.0**-n) for n in (12, 24, 100))
LEAST_NORMAL, LARGE = constant(2.0**-126), constant(2.0**125)
# 1.5 * 2^23: |x| < 2^22 added to it is rounded to an integer, in the last bits.
ROUNDER, ROUNDER_BITS = constant(12582912.0), constant(0x4B400000)  # of the latter, the last 9 bits are zeros
ONE_BITS = constant(0x3F800000)
UPPER_12 = constant(-4096)  # keeps sign, exponent and the first 12 bits of the significand

EXP_MOST, EXP_LEAST = constant(89.0), constant(-104.0)  # e^x is an infinity above, and 0 below
LOG2_E = constant(1.4426950216293335)
LN2_HIGH, LN2_LOW = constant(0.693359375), constant(-0.00021219444170128554)  # 355 / 512, and ln2 - 355 / 512
# (e^r - 1 - r - r^2 / 2) / r^3 for |r| <= ln2 / 2. After 1/6, the interpolation at the four Chebyshev nodes; the
# coefficients are rounded to fp32. e^r has an error below 2^-30.
E3, E4, E5, E6, E7 = (
    constant(value)
    for value in (1 / 6, 0.04166662320494652, 0.008332998491823673, 0.0013918773038312793, 0.000201487957383506)
)
EXP2_LEAST = constant(-126.0)  # exp2 is 2^-126 below
# (2^f - 1) / f for |f| <= 1/2: the least largest error, of one coefficient after the other, each rounded to fp32 before
# the next is found. 2^f has an error below 2^-28.
T1, T2, T3, T4, T5, T6 = (
    constant(value)
    for value in (
        0.6931471824645996, 0.24022647738456726, 0.05550359562039375,
        0.009618495590984821, 0.001339096575975418, 0.00015331170288845897,
    )
)  # fmt: skip

SQRT_HALF_BITS = constant(0x3F3504F3)
LN2_TOP, LN2_REST = constant(6.9313812256e-01), constant(9.0580006145e-06)
L1, L2, L3, L4 = (constant(value) for value in (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841))


@elementwise
def nan_beside(x):
    """NaN with the bits 7fc00000, of x's shape.

    A constant NaN is unequal to itself: Triton takes it for one that has changed between two kernels of a process.
    """
    return fp32_of((bits_of(x) & 0) | QUIET_NAN)


@elementwise
def canonical(x):
    """x, and for every NaN the one with the bits 7fffffff."""
    return fp32_of(tl.where(x != x, NAN_BITS, bits_of(x)))


@elementwise
def fp32_of_bf16(bits):
    """Return the number whose bf16 bits are the low half of an int32."""
    return fp32_of(bits << 16)


@elementwise
def bf16_bits(x):
    """x rounded to nearest even, as bf16 bits in the low half of an int32; every NaN is 7fff."""
    bits = bits_of(x)
    return tl.where(x != x, BF16_NAN, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@elementwise
def fp32_of_small(n):
    """Return an int32 below 2^22 as fp32."""
    return fp32_of(n + ROUNDER_BITS) - ROUNDER


@elementwise
def scaled(x, n):
    """x * 2^n, rounded once, for 0.5 <= |x| < 2 and an int32 n from -252 to 254."""
    half = n >> 1
    return x * fp32_of((half + 127) << 23) * fp32_of((n - half + 127) << 23)


@elementwise
def exp_parts(x):
    """high, low and n: e^x = (high + low) * 2^n, |low| < 0.07. An x beyond EXP_MOST or EXP_LEAST counts as these."""
    x = tl.where(x > EXP_MOST, EXP_MOST, x)
    x = tl.where(x < EXP_LEAST, EXP_LEAST, x)
    rounded = x * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    without_high = x - n * LN2_HIGH
    cut = n * LN2_LOW
    r = without_high - cut
    lost = (without_high - r) - cut
    p = ((((r * E7 + E6) * r + E5) * r + E4) * r + E3) * r + HALF
    high = r + ONE_FP32
    low = (r - (high - ONE_FP32)) + (r * r * p + lost)
    return high, low, bits_of(rounded) - ROUNDER_BITS


@elementwise
def exp(x):
    """e^x."""
    high, low, n = exp_parts(x)
    return scaled(high + low, n)


@elementwise
def exp2(x):
    """2^x for x <= 127; at least 2^-126."""
    x = at_least(x, EXP2_LEAST)
    rounded = x + ROUNDER
    f = x - (rounded - ROUNDER)
    p = fma(fma(fma(fma(fma(f, T6, T5), f, T4), f, T3), f, T2), f, T1)
    return fma(f, p, ONE_FP32) * fp32_of((bits_of(rounded) << 23) + ONE_BITS)


@elementwise
def log(x):
    """Return the natural logarithm: -inf of either zero, NaN of negative numbers."""
    small = x < LEAST_NORMAL
    normal = tl.where(small, x * TWO_25, x)
    bits = bits_of(normal)
    k = (bits - SQRT_HALF_BITS) >> 23
    f = fp32_of(bits - (k << 23)) - ONE_FP32
    scale = fp32_of_small(tl.where(small, k - 25, k))
    s = tl.div_rn(f, f + TWO)
    z = s * s
    w = z * z
    series = z * (w * L3 + L1) + w * (w * L4 + L2)
    square = f * f * HALF
    result = s * (square + series) + scale * LN2_REST - square + f + scale * LN2_TOP
    result = tl.where(x == INFINITY, x, result)
    result = tl.where(x == ZERO, MINUS_INFINITY, result)
    return tl.where(x >= ZERO, result, nan_beside(x))


@elementwise
def sigmoid(x):
    """1 / (1 + e^-x)."""
    negative = x < ZERO
    high, low, n = exp_parts(tl.where(negative, x, -x))
    e = high + low
    e_low = scaled((high - e) + low, n)  # what rounding to e has lost
    e = scaled(e, n)
    e_low = tl.where(e < TWO_M100, ZERO, e_low)
    divisor = e + ONE_FP32
    cut = fp32_of(bits_of(divisor) & UPPER_12)
    divisor_low = ((ONE_FP32 - cut) + e) + e_low
    inverse = tl.div_rn(ONE_FP32, divisor)
    top = tl.where(negative, e, ONE_FP32)
    top_low = tl.where(negative, e_low, ZERO)
    quotient = fp32_of(bits_of(top * inverse) & UPPER_12)
    return quotient + (((top - quotient * cut) + top_low) - quotient * divisor_low) * inverse


@elementwise
def rsqrt(x):
    """1 / sqrt(x): +inf of either zero, NaN of negative numbers."""
    up, down = x < LEAST_NORMAL, x > LARGE
    x = tl.where(up, x * TWO_24, tl.where(down, x * TWO_M24, x)) + ZERO
    root = tl.sqrt_rn(tl.div_rn(ONE_FP32, x))
    return tl.where(x >= ZERO, root * tl.where(up, TWO_12, tl.where(down, TWO_M12, ONE_FP32)), nan_beside(x))
