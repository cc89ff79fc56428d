"""The sum of kernels/tensor_core_sum.py on a CPU, compiled with numba.

numba and not C: it installs as a wheel on machines without a compiler, and compiles for the vectors of the processor
it finds. The compiled code is kept beside this file, or in the user's cache folder.

WIDE columns of a row are done together, so every inner loop has a fixed length and no branch, and the compiler turns
it into vector instructions. The product of two bf16 numbers is exact in fp32; times 2 ** (KEPT - top) it is exact
again, and the conversion to an integer cuts it toward zero. Eight terms and the accumulator fit 32 bits, so a step has
two partial sums. They are added in fp64, exactly; cut to 24 bits and scaled back they are the new accumulator.

That holds while fp32 and its scales reach: for exponents between LEAST_FAST and MOST_FAST. Every other step is
computed by `_exact_step`, with integers, element by element: subnormal results, overflow, infinities and NaN.

Importing this module loads numba (a second); compiling takes ten, once a machine.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.numba_fma import fma
from tp_invariant_recipes.kernels.numba_loop import cpu_loop
from tp_invariant_recipes.kernels.tensor_core_sum import KEPT, LEAST_TOP, NAN, STEP

HALF = STEP // 2
WIDE = 128  # columns done together
LEAST_FAST, MOST_FAST = -100, 60  # exponents for which fp32 and its scales reach
MOST_BEFORE = 90  # of an accumulator
# Exponents are of 16 bits, of which a vector compares twice as many as of fp32: sums of two fit as well.
NOT_FINITE = 1000  # of infinities and NaN, beyond MOST_FAST
NO_EXPONENT = -4096  # of a zero: with any other, below every sum of two
SMALL = 2**20  # products of numbers that one thread computes faster than several could start
BF16_NAN = 0x7FFF  # what cuBLAS rounds NAN to


class Rows(NamedTuple):
    """Left operand: values, exponents, [m, k]; the highest exponent of each step, [m, k / STEP]. k is padded."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int16]
    highest: NDArray[np.int16]


class Panels(NamedTuple):
    """Right operand in panels of WIDE columns: values, exponents [n / WIDE, k, WIDE]; highest [n / WIDE, k / STEP]."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int16]
    highest: NDArray[np.int16]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as a tensor core sums it, on as many threads as torch has.

    a, b:    [m, k] and [k, n] bf16, or both fp32, on the CPU, with any strides.
    returns: [m, n] fp32; `rounded` makes the bf16 output of it.
    raises TypeError: other dtypes.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"a product of {a.dtype} and {b.dtype}; both must be bf16, or both fp32")
    if a.dtype == torch.float32:
        return torch.from_numpy(_fp32(_array(a), _array(b)))
    if b.shape[1] < WIDE and b.shape[1] < a.shape[0]:  # a product of numbers, and the sum of a step, commute
        return torch.from_numpy(_bf16(bits_of(b.t()), bits_of(a.t()))).t().contiguous()
    return torch.from_numpy(_bf16(bits_of(a), bits_of(b)))


def rounded(total: Tensor) -> Tensor:
    """A sum of `product`, fp32, as the bf16 that a GPU's product would write: to nearest even, every NaN the same."""
    out = total.to(torch.bfloat16)
    return out.view(torch.int16).masked_fill_(total.isnan(), BF16_NAN).view(torch.bfloat16)


def bits_of(x: Tensor) -> NDArray[np.uint16]:
    """The bits of a bf16 tensor, contiguous."""
    return _array(x.detach().contiguous().view(torch.int16)).view(np.uint16)


def _bf16(a: NDArray[np.uint16], b: NDArray[np.uint16]) -> NDArray[np.float32]:
    n = b.shape[1]
    rows, panels = Rows(*split_rows(a)), Panels(*split_panels(b))
    out = np.zeros((a.shape[0], panels.values.shape[0] * WIDE), np.float32)
    work = a.shape[0] * a.shape[1] * n
    kept = np.int32(KEPT)

    def add(out: Any, a: Any, exponents: Any, highest: Any) -> None:
        _add_bf16(out, a, exponents, highest, *panels, kept)

    by_rows(add, work, out, *rows)
    return np.ascontiguousarray(out[:, :n])


def _fp32(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    by_rows(lambda out, a: _add_fp32(a, b, out), a.size * b.shape[1], out, a)
    return out


def by_rows(add: Callable[..., None], work: int, *arrays: NDArray[Any]) -> None:
    """Call add(*parts) for parts of the first dimension of all arrays, side by side. Each row's result is independent
    of the other rows. Threads of Python and not numba's own: those do not survive the fork that starts a CPU rank.

    work: products of numbers in all.
    """
    m = arrays[0].shape[0]
    threads = min(torch.get_num_threads(), m) if work > SMALL else 1
    if threads == 1:
        return add(*arrays)
    borders = [m * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [slice(*ends) for ends in pairwise(borders)]
        for done in [pool.submit(add, *(x[part] for x in arrays)) for part in parts]:
            done.result()


def _array(x: Tensor) -> NDArray[Any]:
    return x.detach().contiguous().numpy()


@njit(inline="always")
def _exponent(bits: Any) -> Any:
    """Of the bits of a bf16 number."""
    field = (bits >> 7) & 255
    if field == 255:
        return np.int16(NOT_FINITE)
    if bits & 0x7FFF == 0:
        return np.int16(NO_EXPONENT)
    return np.int16(max(field, 1) - 127)


@cpu_loop
def split_rows(bits: Any) -> Any:
    """[m, k] bits of bf16 → `Rows`, with k padded to a multiple of STEP by zeros."""
    m, k = bits.shape
    steps = (k + STEP - 1) // STEP
    values = np.zeros((m, steps * STEP), np.float32)
    words = values.view(np.uint32)
    exponents = np.full((m, steps * STEP), NO_EXPONENT, np.int16)
    highest = np.full((m, steps), NO_EXPONENT, np.int16)
    for i in range(m):
        for t in range(k):
            word = np.int32(bits[i, t])
            words[i, t] = np.uint32(word) << np.uint32(16)
            exponents[i, t] = _exponent(word)
            highest[i, t // STEP] = max(highest[i, t // STEP], exponents[i, t])
    return values, exponents, highest


@cpu_loop
def split_panels(bits: Any) -> Any:
    """[k, n] bits of bf16 → `Panels`, with k and n padded to multiples of STEP and WIDE by zeros."""
    k, n = bits.shape
    steps, panels = (k + STEP - 1) // STEP, (n + WIDE - 1) // WIDE
    values = np.zeros((panels, steps * STEP, WIDE), np.float32)
    words = values.view(np.uint32)
    exponents = np.full((panels, steps * STEP, WIDE), NO_EXPONENT, np.int16)
    highest = np.full((panels, steps), NO_EXPONENT, np.int16)
    for panel in range(panels):
        first, width = panel * WIDE, min(WIDE, n - panel * WIDE)
        for t in range(k):
            top = highest[panel, t // STEP]
            for j in range(width):
                word = np.int32(bits[t, first + j])
                words[panel, t, j] = np.uint32(word) << np.uint32(16)
                exponents[panel, t, j] = _exponent(word)
                top = max(top, exponents[panel, t, j])
            highest[panel, t // STEP] = top
    return values, exponents, highest


@cpu_loop
def _add_bf16(out: Any, a: Any, ea: Any, ha: Any, b: Any, eb: Any, hb: Any, kept: Any) -> None:
    """Add all steps of all rows. out: [m, panels · WIDE] fp32, the accumulators; then `Rows` and `Panels`."""
    work = workspace()
    for panel in range(b.shape[0]):
        columns = slice(panel * WIDE, (panel + 1) * WIDE)
        for i in range(a.shape[0]):
            _add_all_steps(out[i, columns], a[i], ea[i], ha[i], b[panel], eb[panel], hb[panel], kept, work)


@njit(inline="always")
def workspace() -> Any:
    """Memory that `add_steps` needs; each thread has its own."""
    total, scale, back, sums = (
        np.empty(WIDE, np.float32), np.empty(WIDE, np.float32), np.empty(WIDE, np.float64), np.empty(WIDE, np.float64)
    )  # fmt: skip
    views = total.view(np.int32), scale.view(np.int32), back.view(np.int64), sums.view(np.int64)
    top, low, high = np.empty(WIDE, np.int16), np.empty(WIDE, np.int32), np.empty(WIDE, np.int32)
    return (total, scale, back, sums), views, (top, low, high)


@njit(inline="always")
def _add_all_steps(out: Any, a: Any, ea: Any, ha: Any, b: Any, eb: Any, hb: Any, kept: Any, work: Any) -> None:
    """Add some steps of one row and one panel to WIDE accumulators.

    out: [WIDE] fp32; a, ea: [k]; ha: [k / STEP]; b, eb: [k, WIDE]; hb: [k / STEP]; kept: KEPT; work: of `workspace`.
    """
    (total, scale, back, sums), (bits, scale_bits, back_bits, sum_bits), (top, low, high) = work
    field, half = np.int32(0), np.int16(NO_EXPONENT // 2)
    for j in range(WIDE):
        total[j] = out[j]
    for j in range(WIDE):
        field = max(field, (bits[j] >> 23) & 255)
    fast = field <= MOST_BEFORE + 127
    for k in range(0, a.shape[0], STEP):
        most_a, most_b = ha[k // STEP], hb[k // STEP]
        # Each by itself too: an infinity times a zero is NaN, whose exponents add up to little.
        fast = fast and most_a < NOT_FINITE and most_b < NOT_FINITE and most_a + most_b <= MOST_FAST
        reached = fast
        if fast:
            for j in range(WIDE):
                top[j] = np.int16(NO_EXPONENT if total[j] == 0 else ((bits[j] >> 23) & 255) - 127)
            for j in range(WIDE):
                highest = top[j]
                for t in range(STEP):  # numba makes a sum of two an int64, and the compiler one of 16 bits again
                    one = np.int16(ea[k + t] + eb[k + t, j])
                    highest = one if one > highest else highest
                top[j] = highest
            for j in range(WIDE):
                highest = top[j]
                low[j] = np.int32(0) if highest >= LEAST_FAST or highest <= half else np.int32(1)  # or no term
                high[j] = np.int32(max(highest, LEAST_FAST))
            below = np.int32(0)
            for j in range(WIDE):
                below = np.int32(below | low[j])
            for j in range(WIDE):
                scale_bits[j] = np.int32((np.int32(127) + kept - high[j]) << 23)
                back_bits[j] = np.int64(high[j] - kept + 1023) << 52
            reached = below == 0
        if not reached:
            for j in range(WIDE):
                bits[j] = _exact_step(a, b, j, k, bits[j], kept)
            continue
        for j in range(WIDE):
            unit = scale[j]
            term = np.int32(total[j] * unit)
            for t in range(HALF):
                term += np.int32(a[k + t] * b[k + t, j] * unit)
            low[j] = term
        for j in range(WIDE):
            unit = scale[j]
            term = np.int32(0)
            for t in range(HALF, STEP):
                term += np.int32(a[k + t] * b[k + t, j] * unit)
            high[j] = term
        for j in range(WIDE):
            sums[j] = np.float64(low[j]) + np.float64(high[j])  # below 2 ** 32: exact
        for j in range(WIDE):
            sum_bits[j] = sum_bits[j] & np.int64(-(1 << 29))  # cut to 24 bits
        for j in range(WIDE):
            total[j] = np.float32(sums[j] * back[j])
    for j in range(WIDE):
        out[j] = total[j]


@cpu_loop
def add_steps(out: Any, a: Any, ea: Any, ha: Any, b: Any, eb: Any, hb: Any, kept: Any, work: Any) -> None:
    """`_add_all_steps` as a call: its code is long, and the loops of attention have it in several places."""
    _add_all_steps(out, a, ea, ha, b, eb, hb, kept, work)


@cpu_loop
def _exact_step(row: Any, rows: Any, j: Any, k: Any, before: Any, kept: Any) -> Any:
    """One step of one element by the definition. row: [k], rows: [k, WIDE]; before: bits of the accumulator, as the
    result."""
    a, b = row[k : k + STEP].view(np.int32), rows[k : k + STEP].view(np.int32)
    above = below = False
    nothing = np.int64(before) & 0x7FFFFFFF
    if nothing > 0x7F800000:
        return np.int32(NAN)
    if nothing == 0x7F800000:
        above, below = before > 0, before < 0
    top = np.int64(LEAST_TOP)
    size, exponent = _split_fp32(before)
    if size != 0 and not (above or below):
        top = max(top, exponent)
    for t in range(STEP):
        x, y = np.int64(a[t]) & 0x7FFFFFFF, np.int64(b[t, j]) & 0x7FFFFFFF
        if x >= 0x7F800000 or y >= 0x7F800000:
            if x > 0x7F800000 or y > 0x7F800000 or x == 0 or y == 0:
                return np.int32(NAN)
            negative = (a[t] < 0) != (b[t, j] < 0)
            above, below = above or not negative, below or negative
        elif x != 0 and y != 0:
            top = max(top, _split_fp32(a[t])[1] + _split_fp32(b[t, j])[1])
    if above and below:
        return np.int32(NAN)
    if above or below:
        return np.int32(0x7F800000) if above else np.int32(-0x800000)
    unit = top - kept
    total = _cut(size, exponent - 23 - unit)
    for t in range(STEP):
        x, ex = _split_fp32(a[t])
        y, ey = _split_fp32(b[t, j])
        total += _cut((x >> 16) * (y >> 16), ex + ey - 14 - unit)
    return _fp32_bits(total, unit)


@njit(inline="always")
def _split_fp32(word: Any) -> Any:
    """Significand with its sign and exponent: value = significand * 2 ** (exponent - 23), of a finite number."""
    field, size = (np.int64(word) >> 23) & 255, np.int64(word) & 0x7FFFFF
    size = size | (np.int64(field > 0) << 23)
    return (-size if word < 0 else size), max(field, np.int64(1)) - 127


@njit(inline="always")
def _cut(value: Any, shift: Any) -> Any:
    """value * 2 ** shift, cut toward zero."""
    size = abs(value)
    size = size << min(shift, np.int64(40)) if shift >= 0 else size >> min(-shift, np.int64(63))
    return -size if value < 0 else size


@njit(inline="always")
def _fp32_bits(total: Any, unit: Any) -> Any:
    """Bits of total * 2 ** unit, cut toward zero to fp32; +0 of a zero."""
    size, length = abs(total), np.int64(0)
    while size >> length:
        length += 1
    exponent = unit + length - 1
    last = max(exponent - 23, np.int64(-149))
    size = _cut(size, unit - last)
    if size == 0:
        return np.int32(0)
    word = ((last + 150) << 23) | (size & 0x7FFFFF) if size >= 0x800000 else size
    if exponent > 127:
        word = np.int64(0x7F800000)
    return np.int32(word | -0x80000000) if total < 0 else np.int32(word)


@cpu_loop
def _add_fp32(a: Any, b: Any, out: Any) -> None:
    """a: [m, k], b: [k, n], contiguous fp32; out: [m, n] fp32 zeros, to which fma adds for every k in order."""
    m, k = a.shape
    n = b.shape[1]
    bits = out.view(np.uint32)
    for i in range(m):
        for t in range(k):
            x = a[i, t]
            for j in range(n):
                out[i, j] = fma(x, b[t, j], out[i, j])  # type: ignore[call-arg]  # numba passes the context
        for j in range(n):
            if (bits[i, j] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                bits[i, j] = np.uint32(NAN)
