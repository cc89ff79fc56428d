# SPDX-License-Identifier: Apache-2.0
"""exp, log, sigmoid and rsqrt in fp32, and sin and cos of tables: their errors, and one result for every compiler."""

import math
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
from numba import njit

from tests.definitions import elementwise
from tests.definitions.elementwise import numpy_version
from tests.definitions.tensor_core_sum import fma
from tests.operands import EVERY_BF16, SPECIAL, any_bits
from tp_invariant_recipes.kernels.cpu import numba_loop
from tp_invariant_recipes.portable import shared_source
from tp_invariant_recipes.portable.ieee import math as ieee_math
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.portable.shared_source import numba_version

NAN = 0x7FFFFFFF
EXACT = {
    "exp": mpmath.exp,
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log": mpmath.log,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
}
BOUND = {"exp": 0.76, "exp2": 0.79, "log": 0.83, "sigmoid": 0.76, "rsqrt": 0.86}  # ULP, as ieee_math.py says
RANGE = {
    "exp": (-104, 89), "exp2": (-126, 127), "log": None, "sigmoid": (-104, 30), "rsqrt": None,
}  # None: every positive number  # fmt: skip
MOST = {"exp": 88.7, "sigmoid": np.inf}  # where a result is finite, if not up to the range's end
ALL = ("canonical", "bf16_bits", *EXACT)


def bits_of_array(x):
    return np.asarray(x, np.float32).view(np.uint32)


def canonical_bits(x):
    return np.where(np.isnan(x), np.uint32(NAN), bits_of_array(x))


@cache
def compiled_loop(name):
    function = numba_version(name)

    @njit
    def loop(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    def call(x):
        out = np.empty(x.shape, np.int32 if name == "bf16_bits" else np.float32)
        loop(x, out)
        return out

    return call


def numbers(name, count):
    random = np.random.default_rng(1)
    if RANGE[name]:
        return random.uniform(*RANGE[name], count).astype(np.float32)
    return random.integers(1, 0x7F800000, count, dtype=np.uint32).view(np.float32)


def errors(actual, x, exact):
    """In ULP of the exact results, which are finite in fp32."""
    worst = 0.0
    with mpmath.workprec(120):
        for result, number in zip(actual.tolist(), x.tolist(), strict=True):
            value = exact(mpmath.mpf(number))
            exponent = max(int(mpmath.frexp(value)[1]) - 24, -149)
            worst = max(worst, abs(float(mpmath.ldexp(mpmath.mpf(result) - value, -exponent))))
    return worst


def with_finite_results(name, x):
    least, most = RANGE[name] or (0, np.inf)
    return x[np.isfinite(x) & (x > least) & (x < MOST.get(name, most))]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "points", (4000, *(pytest.param(points, marks=pytest.mark.release) for points in ("every bf16", 10**6))), ids=str
)
def test_the_error_is_below_one_ulp(name, points):
    x = with_finite_results(name, EVERY_BF16 if points == "every bf16" else numbers(name, points))
    assert len(x) > 3000
    assert errors(numpy_version(name)(x), x, EXACT[name]) <= BOUND[name] < 1


def test_another_constant_has_a_larger_error(monkeypatch):
    monkeypatch.setattr(ieee_math, "E4", shared_source.constant(0.041667))
    elementwise.version.cache_clear()
    try:
        x = numbers("exp", 4000)
        assert errors(numpy_version("exp")(x), x, mpmath.exp) > BOUND["exp"]
    finally:
        elementwise.version.cache_clear()


# function -> an argument and its result, ...
SPECIALS = {
    "exp": ((0.0, 1.0), (-0.0, 1.0), (np.inf, np.inf), (-np.inf, 0.0), (89.0, np.inf), (-104.0, 0.0), (1e-45, 1.0)),
    "exp2": ((0.0, 1.0), (-0.0, 1.0), (1.0, 2.0), (-126.0, 2.0**-126), (-np.inf, 2.0**-126), (1e-45, 1.0)),
    "log": ((0.0, -np.inf), (-0.0, -np.inf), (np.inf, np.inf), (-np.inf, np.nan), (-1.0, np.nan), (1.0, 0.0)),
    "sigmoid": ((0.0, 0.5), (-0.0, 0.5), (np.inf, 1.0), (-np.inf, 0.0), (88.0, 1.0), (-200.0, 0.0)),
    "rsqrt": ((0.0, np.inf), (-0.0, np.inf), (np.inf, 0.0), (-np.inf, np.nan), (-1.0, np.nan), (4.0, 0.5)),
}


@pytest.mark.parametrize("name", SPECIALS)
def test_special_values(name):
    x, expected = np.array([*SPECIALS[name], (np.nan, np.nan)], np.float32).T
    assert (canonical_bits(numpy_version(name)(x)) == canonical_bits(expected)).all()


@pytest.mark.parametrize("name", ALL)
def test_numba_rounds_every_operation(name):
    x = np.concatenate([EVERY_BF16, SPECIAL, any_bits(50_000), np.linspace(-20, 20, 50_000, dtype=np.float32)])
    result, expected = compiled_loop(name)(x), numpy_version(name)(x)
    if name == "bf16_bits":
        assert ((result & 0xFFFF) == (expected & 0xFFFF)).all()
    else:
        assert (canonical_bits(result) == canonical_bits(expected)).all()


def _nearest(value: Fraction) -> float:
    """A rational number rounded to fp32, to nearest even; a normal one."""
    if value == 0:
        return 0.0
    exponent = math.frexp(abs(value.numerator) / value.denominator)[1] - 24
    unit = Fraction(2) ** exponent
    return float(round(value / unit) * unit)


def _terms():
    """Numbers whose products with a third come close to the middle between two fp32 numbers, and others."""
    random = np.random.default_rng(4)
    a, b = random.uniform(1, 2, (2, 20_000)).astype(np.float32)
    c = np.ldexp(random.uniform(1, 2, a.size), random.integers(-60, 60, a.size)).astype(np.float32)
    half = (1 + 2.0**-12 + random.integers(0, 9, a.size) * 2.0**-23).astype(np.float32)
    return np.concatenate([a, half]), np.concatenate([b, half]), np.concatenate([c, (c * 2.0**-30).astype(np.float32)])


def test_an_fma_rounds_once():
    """In numba and in numpy. The sum in fp64, rounded to fp32 after that, would round twice."""
    a, b, c = _terms()
    terms = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    expected = np.array([_nearest(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in terms], np.float32)

    @njit
    def loop(a, b, c, out):
        for i in range(a.size):
            out[i] = numba_loop.fma(a[i], b[i], c[i])

    result = np.empty_like(a)
    loop(a, b, c, result)
    assert (bits_of_array(result) == bits_of_array(expected)).all()
    assert (bits_of_array(fma(a, b, c)) == bits_of_array(expected)).all()
    assert (bits_of_array((a.astype(np.float64) * b + c).astype(np.float32)) != bits_of_array(expected)).any()


def test_canonical_changes_nan_only():
    x = np.concatenate([SPECIAL, any_bits(10_000)])
    assert (bits_of_array(compiled_loop("canonical")(x)) == canonical_bits(x)).all()
    assert (bits_of_array(x) != canonical_bits(x)).any()


def test_bf16_is_rounded_to_nearest_even():
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFFC00000, 0x7F800000, 0x80000001, 0x00008001])
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FFF, 0x7F80, 0x8000, 0x0001]
    assert (numpy_version("bf16_bits")(x.astype(np.uint32).view(np.float32)) & 0xFFFF).tolist() == expected


@pytest.mark.parametrize("points", (3000, pytest.param(10**6, marks=pytest.mark.release)))
def test_sines_of_tables(points):
    random = np.random.default_rng(2)
    near = np.arange(-500, 500) * (np.pi / 2)  # where one of the two is almost zero
    x = np.concatenate([random.uniform(-40, 40, points // 2), random.uniform(-(2**20), 2**20, points // 2), near])
    sin, cos = ieee_rotary.sin_cos(x)
    assert errors(sin, x, mpmath.sin) < 0.501
    assert errors(cos, x, mpmath.cos) < 0.501


@pytest.mark.parametrize("angle", (2.0**21, np.nan, np.inf))
def test_angles_without_a_sine_are_refused(angle):
    with pytest.raises(ValueError, match="angles up to"):
        ieee_rotary.sin_cos(np.array([1.0, angle]))


def test_two_functions_of_one_name_are_refused():
    def exp(x):
        return x

    with pytest.raises(ValueError, match="two elementwise functions are called exp"):
        shared_source.elementwise(exp)


# function, its constant; a number whose result has other bits if the constant is an ULP nearer to zero, and the result;
# such a number and its result for an ULP away from zero. Found among all numbers; log's last coefficient has none.
DECIDING = (
    ("exp", "LOG2_E", 0x423B2655, 0x613504E7, 0x41635A2F, 0x49B504F6),
    ("exp", "LN2_HIGH", 0x3EB1721B, 0x3FB504F4, 0x3EB1721A, 0x3FB504F4),
    ("exp", "LN2_LOW", 0x3F262221, 0x3FF4EF17, 0x3F214AA7, 0x3FF05855),
    ("exp", "E3", 0x3E003ED3, 0x3F9113E9, 0x3E001DFC, 0x3F910F41),
    ("exp", "E4", 0x3E022B9D, 0x3F9159CB, 0x3E0719B4, 0x3F920D5E),
    ("exp", "E5", 0x3E3CE4D0, 0x3F99EE0A, 0x3E51342F, 0x3F9D036B),
    ("exp", "E6", 0x3EA879E4, 0x3FB1E031, 0x3EA0212B, 0x3FAEFFE1),
    ("exp", "E7", 0x4240E226, 0x623DC0C0, 0x3E74BBEF, 0x3FA28E94),
    ("exp2", "T1", 0x3E000026, 0x3F8B95C6, 0x3E00001B, 0x3F8B95C4),
    ("exp2", "T2", 0x3E0003F4, 0x3F8B9622, 0x3E000395, 0x3F8B9618),
    ("exp2", "T3", 0x3E0045EE, 0x3F8B9C5E, 0x3E009ECA, 0x3F8BA4C3),
    ("exp2", "T4", 0x3E0EACC7, 0x3F8CFA7D, 0x3E10482F, 0x3F8D21C4),
    ("exp2", "T5", 0x3E713CF9, 0x3F96B480, 0x3E91DE14, 0x3F9BF207),
    ("exp2", "T6", 0x3EEFD6B4, 0x3FB11A0F, 0x3ED94B13, 0x3FABC726),
    ("log", "LN2_TOP", 0x3E000001, 0xC0051591, 0x3E000001, 0xC0051591),
    ("log", "LN2_REST", 0x3E032D03, 0xC0038407, 0x3E05AB13, 0xC0024FA3),
    ("log", "L1", 0x3E07B713, 0xC00156A6, 0x3E0AB794, 0xBFFFE063),
    ("log", "L2", 0x3E232521, 0xBFEB1D51, 0x3E1A4D27, 0xBFF23F8B),
    ("log", "L3", 0x3E4A1916, 0xBFCFB543, 0x3F30588F, 0xBEBED673),
)


@pytest.mark.parametrize("name, coefficient, less, of_less, more, of_more", DECIDING, ids=lambda v: str(v)[:8])
def test_each_constant_is_the_stated_one(monkeypatch, name, coefficient, less, of_less, more, of_more):
    """A coefficient that is off by an ULP changes the result of one number in millions: of these."""
    x = np.array([less, more], np.uint32).view(np.float32)
    for version in (numpy_version(name), compiled_loop(name)):
        assert bits_of_array(version(x)).tolist() == [of_less, of_more]
    stated = np.float32(getattr(ieee_math, coefficient).value)
    for step, number, result in ((-1, x[:1], of_less), (1, x[1:], of_more)):  # the control
        other = (stated.view(np.int32) + np.int32(step)).view(np.float32)
        monkeypatch.setattr(ieee_math, coefficient, shared_source.constant(float(other)))
        monkeypatch.setattr(elementwise, "version", cache(elementwise.version.__wrapped__))
        assert bits_of_array(numpy_version(name)(number)).tolist() != [result]


@pytest.mark.parametrize("n, power", ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8)))
def test_the_least_power_of_two(n, power):
    assert power_of_two(n) == power
