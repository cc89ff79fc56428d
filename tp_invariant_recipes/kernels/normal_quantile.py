# SPDX-License-Identifier: Apache-2.0
"""Philox's words and the normal quantile, in operators that tensors and single numbers share; tensors change in place.

numerics/megatron/init.py calls them with tensors, kernels/cpu/normal_cpu.py compiles them for single numbers. Integers
have 64 bits, others are fp64; nothing fuses a product and a sum.
"""

from collections.abc import Sequence
from math import log, sqrt
from typing import Any

WORD = 0xFFFFFFFF
MOST_CENTRAL, MOST_NEAR = 0.425, 5.0  # |u - 1/2| and r up to which `central` and `near` hold
ROOT_HALF, LOG_2 = sqrt(0.5), log(2.0)
SERIES = tuple(1.0 / k for k in range(1, 25, 2))  # of artanh(s) / s, in s²
# |u - 1/2| <= 0.425, polynomial in 0.180625 - (u - 1/2)²
CENTRAL = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
        4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
        3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
# further out, polynomial in r - 1.6, r = sqrt(-log(tail)) <= 5
NEAR = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
        1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
        1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
# beyond, polynomial in r - 5
FAR = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
        2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
        1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def philox4x32(counter: Sequence[Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10. Words of 32 bits, stored in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product of two words wraps into the sign bit, hence the masks on both halves.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high_a, high_b = a >> 32, b >> 32
        high_a &= WORD
        high_b &= WORD
        a &= WORD
        b &= WORD
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, b, high_a ^ c3 ^ k1, a
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def bits_of(high: Any, low: Any) -> Any:
    """52 bits of two words."""
    return high << 20 | low >> 12


def horner(x: Any, coefficients: Sequence[float]) -> Any:
    """Return the polynomial, lowest coefficient first."""
    value = x * coefficients[-1]
    for i in range(len(coefficients) - 2, 0, -1):
        value += coefficients[i]
        value *= x
    value += coefficients[0]
    return value


def ratio(x: Any, polynomials: Sequence[Sequence[float]]) -> Any:
    """Return the quotient of two polynomials."""
    return horner(x, polynomials[0]) / horner(x, polynomials[1])


def central(q: Any) -> Any:
    """Return the quantile of u = 1/2 + q."""
    return ratio(0.180625 - q * q, CENTRAL) * q


def near(r: Any) -> Any:
    """Return the distance of the quantile of u from 0, r = sqrt(-log(u)); `far` is that further out."""
    return ratio(r - 1.6, NEAR)


def far(r: Any) -> Any:
    """As `near`."""
    return ratio(r - 5.0, FAR)


def log_of(m: Any, e: Any) -> Any:
    """Return the natural logarithm of m · 2^e, to an ulp or two, from IEEE operations alone. m: in [1/√2, √2).

    log x = e · log 2 + 2 · artanh(s),  s = (m - 1) / (m + 1).
    """
    s = (m - 1.0) / (m + 1.0)
    return e * LOG_2 + s * horner(s * s, SERIES) * 2.0
