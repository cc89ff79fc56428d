# SPDX-License-Identifier: Apache-2.0
"""A float as exact text: its width and its IEEE 754 pattern in hexadecimal, such as "f32:40c7d2f1".

Two texts are equal if and only if the bits are: -0.0 is not 0.0, and a NaN equals only the NaN of the same bits.
"""

import functools
import math
import re
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Format:
    """One IEEE format: its width in bits, its struct codes, the patterns of its sign bit and of +infinity."""

    width: int
    integer: str
    floating: str
    sign: int
    infinity: int


_FORMATS = {
    32: _Format(32, ">I", ">f", 1 << 31, 0x7F80_0000),
    64: _Format(64, ">Q", ">d", 1 << 63, 0x7FF0_0000_0000_0000),
}
_TEXT = re.compile(r"f(?:32:([0-9a-f]{8})|64:([0-9a-f]{16}))")
_F32_DIGITS = 9  # decimal digits that always distinguish two f32
_OFTEN = 6  # digits that are too few for most f32 of a training
_DROPPED = 52 - 23  # fraction bits of f64 that f32 lacks


def float_bits(value: float, width: int) -> str:
    """Write `value` as text of 32 or 64 bits. ValueError: no number of that width equals it, so it would be rounded."""
    if width not in _FORMATS:
        raise ValueError(f"a float has 32 or 64 bits, not {width}")
    value = float(value)
    pattern = _reinterpret(_FORMATS[64].floating, _FORMATS[64].integer, value)
    if width == 32:
        pattern = _narrow(value, pattern)
    return f"f{width}:{pattern:0{width // 4}x}"


def bits_float(text: str) -> float:
    """Read the number back, also the payload of an f32 NaN. ValueError: `text` is not as `float_bits` writes it."""
    fmt, pattern = _parse(text)
    if fmt.width == 32 and _is_nan(fmt, pattern):
        # The processor's widening would set the quiet bit of a signalling NaN, so widen the integers.
        sign, fraction = pattern & fmt.sign, pattern & ~(fmt.sign | fmt.infinity)
        fmt, pattern = _FORMATS[64], sign << 32 | _FORMATS[64].infinity | fraction << _DROPPED
    return _reinterpret(fmt.integer, fmt.floating, pattern)


def ulp_distance(a: str, b: str) -> int | None:
    """Return the steps between neighbouring numbers from `a` to `b`; -0.0 is not 0.0. None: a NaN, or other widths."""
    (fmt, pattern_a), (fmt_b, pattern_b) = _parse(a), _parse(b)
    if fmt != fmt_b or _is_nan(fmt, pattern_a) or _is_nan(fmt, pattern_b):
        return None
    return abs(_rank(fmt, pattern_a) - _rank(fmt, pattern_b))


@functools.lru_cache(maxsize=1 << 16)  # runs that are compared have the same numbers
def readable(text: str) -> float | str:
    """Return the number with the fewest decimal digits that reads back as these bits, for people.

    "nan", "inf" and "-inf" are strings, because JSON has no such numbers. ValueError: as `bits_float`.
    """
    value = bits_float(text)
    if not math.isfinite(value):
        return repr(value)
    if text.startswith("f64"):
        return value  # Python already prints the shortest decimal of an f64
    # Where as many numbers round to it from above as from below, fewer digits than six do not read back if six do not.
    even = math.frexp(value)[0] not in (0.5, -0.5)
    first = _OFTEN + 1 if even and rounded_to_f32(float(f"{value:.{_OFTEN}g}")) != value else 1
    shorter = (float(f"{value:.{digits}g}") for digits in range(first, _F32_DIGITS + 1))
    return next(number for number in shorter if rounded_to_f32(number) == value)


def described(text: str | None) -> dict[str, Any] | None:
    """As JSON has it: the bits, and the number for people. None: there is none."""
    return None if text is None else {"bits": text, "value": readable(text)}


def _parse(text: str) -> tuple[_Format, int]:
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{text!r} is not a float as "f32:" and 8, or "f64:" and 16, lower-case hexadecimal digits')
    return _FORMATS[32 if match[1] else 64], int(match[1] or match[2], 16)


def _narrow(value: float, pattern: int) -> int:
    f32, f64 = _FORMATS[32], _FORMATS[64]
    if math.isnan(value):
        sign, fraction = pattern & f64.sign, pattern & ~(f64.sign | f64.infinity)
        if fraction % (1 << _DROPPED) == 0:
            return sign >> 32 | f32.infinity | fraction >> _DROPPED
    elif rounded_to_f32(value) == value:
        return _reinterpret(f32.floating, f32.integer, value)
    raise ValueError(f"{value!r} is not exactly an f32 number; record it as f64 or pass the f32 itself")


def rounded_to_f32(value: float) -> float:
    """Round to the nearest f32, as a float. struct refuses numbers that overflow; here they become infinite."""
    try:
        return struct.unpack(">f", struct.pack(">f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _reinterpret(source: str, target: str, value: float) -> Any:
    """Read the bytes of one struct code as another; for an integer code the value is an int."""
    return struct.unpack(target, struct.pack(source, value))[0]


def _is_nan(fmt: _Format, pattern: int) -> bool:
    return pattern & ~fmt.sign > fmt.infinity


def _rank(fmt: _Format, pattern: int) -> int:
    """Return number the patterns so that the order of integers is the order of floats: … -1 is -0.0, 0 is 0.0 …"""
    return pattern if pattern < fmt.sign else -1 - (pattern ^ fmt.sign)
