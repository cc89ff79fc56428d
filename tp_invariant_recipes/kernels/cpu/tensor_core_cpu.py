# SPDX-License-Identifier: Apache-2.0
"""The sum of kernels/gemm/segmented_k_gemm.py on a CPU, compiled with numba.

numba and not C: it installs as a wheel on machines without a compiler, and compiles for the vectors of the processor
it finds. The compiled code is kept beside this file, or in the user's cache folder.

WIDE columns of a row are done together, LANES at a time, by `step` of kernels/cpu/tensor_core_vector.py. A thread takes
a panel of WIDE columns and ROWS rows at a time. It splits DEPTH numbers of each column, which then stay in the second
cache for all these rows. The loops go through the rows in blocks and through all steps for each block, so that a step's
part of the right operand stays in the first cache while all rows of the block use it.

`step` computes what fp32 and its scales reach: where the exponents of a row's and of a panel's step are MOST_FAST at
most. It leaves out lanes whose exponents are below LEAST_FAST. What is left out is computed by `_exact_step`, with
integers, element by element: subnormal results, overflow, infinities and NaN.

Importing this module loads numba (a second); compiling takes ten, once a machine.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tp_invariant_recipes.kernels.cpu.cpu_threads import by_parts, threads
from tp_invariant_recipes.kernels.cpu.numba_loop import cpu_loop, fma
from tp_invariant_recipes.kernels.cpu.tensor_core_vector import LANES, MOST_FAST, SQUARE, split, step, transpose
from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import KEPT_BITS, LEAST_TOP, NAN, STEP

WIDE = 128  # columns of a panel
BLOCK = 16  # rows that use a step of a panel one after the other
ROWS, LEAST_ROWS = 256, 32  # that use a split panel, at most and, where threads would wait, at least
DEPTH = 512  # of a panel, split at a time
TRANSPOSED = 64  # numbers of a column that are copied at once: whole lines of the cache
MOST_BEFORE = np.int32(187 << 23)  # bits of 2 ** 60: finite, and more than `step` adds up where operands are small
NOT_FINITE = 127  # exponent of infinities and NaN, and of the largest numbers
NO_EXPONENT = -128  # of a zero
INFINITE = 0x7F800000  # bits; those of a NaN are larger
SMALL = 2**22  # products of numbers that one thread computes faster than another could start
BF16_NAN = 0x7FFF  # what cuBLAS rounds NAN to


class Rows(NamedTuple):
    """Left operand: values, exponents, [m, k]; the highest exponent of each step, [m, k / STEP]. k is padded."""

    values: NDArray[np.float32]
    exponents: NDArray[np.int8]
    highest: NDArray[np.int8]


def gemm(a: Tensor, b: Tensor, *, kept: int = KEPT_BITS, onto: Tensor | None = None) -> Tensor:
    """Compute a @ b as a tensor core sums it, on the rank's processors.

    a, b:    [m, k] and [k, n] bf16, or both fp32, on the CPU, with any strides.
    kept:    of bf16; another number is the sum of another architecture (portable/definition.py).
    onto:    [m, n] fp32, to which the product is added.
    returns: [m, n] fp32, or `onto`; `rounded` makes the bf16 output of it.
    raises TypeError: other dtypes.
    """
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"a GEMM of {a.dtype} and {b.dtype}; both must be bf16, or both fp32")
    if a.dtype == torch.float32:
        total = torch.from_numpy(_fp32(_array(a), _array(b)))
    elif b.shape[1] < WIDE and b.shape[1] < a.shape[0]:  # a product of numbers, and the sum of a step, commute
        total = torch.from_numpy(_bf16(bits_of(b.t()), bits_of(a.t()), 1, kept)[0]).t().contiguous()
    elif onto is not None and onto.is_contiguous():
        _bf16(bits_of(a), bits_of(b), 1, kept, onto.detach().numpy()[None])
        return onto
    else:
        total = torch.from_numpy(_bf16(bits_of(a), bits_of(b), 1, kept)[0])
    return total if onto is None else onto.add_(total)


def partials(a: Tensor, b: Tensor, shards: int) -> Tensor:
    """`product` for each of equal shards of k: [shards, m, n] fp32. a, b: [m, k] and [k, n] bf16."""
    return torch.from_numpy(_bf16(bits_of(a), bits_of(b), shards, KEPT_BITS))


def rounded(total: Tensor) -> Tensor:
    """Return a sum of `product`, fp32, as the bf16 that a GPU's product would write: to nearest even, every NaN the
    same.
    """
    out = total.to(torch.bfloat16)
    return out.view(torch.int16).masked_fill_(total.isnan(), BF16_NAN).view(torch.bfloat16)


def bits_of(x: Tensor) -> NDArray[np.uint16]:
    """Return the bits of a bf16 tensor of two dimensions, one of which has no gaps."""
    x = x.detach()
    if not (x.is_contiguous() or x.t().is_contiguous()):
        x = x.contiguous()
    return x.view(torch.int16).numpy().view(np.uint16)


def _bf16(
    a: NDArray[np.uint16], b: NDArray[np.uint16], shards: int, bits: int, onto: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """[shards, m, n]."""
    (m, k), n = a.shape, b.shape[1]
    if (k // shards) % STEP and shards > 1:  # each shard has steps of its own
        padding = -(k // shards) % STEP
        a = np.pad(a.reshape(m, shards, -1), ((0, 0), (0, 0), (0, padding))).reshape(m, -1)
        b = np.pad(b.reshape(shards, -1, n), ((0, 0), (0, padding), (0, 0))).reshape(-1, n)
    out = np.empty((shards, m, n), np.float32) if onto is None else onto
    panels = shards * -(-n // WIDE)
    parts = max(-(-m // ROWS), min(-(-2 * threads() // max(panels, 1)), m // LEAST_ROWS))
    rows, numbers = Rows(*split_rows(a)), (np.int32(bits), onto is not None)
    by_parts(lambda i, j: _add_bf16(out, i, j, parts, *rows, b, *numbers), panels * parts, pays=m * k * n > SMALL)
    return out


def _fp32(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    by_parts(lambda i, j: _add_fp32(a[i:j], b, out[i:j]), len(a), pays=a.size * b.shape[1] > SMALL)
    return out


def _array(x: Tensor) -> NDArray[Any]:
    return x.detach().contiguous().numpy()


@njit(inline="always")
def _exponent(bits: Any) -> Any:
    """Of the bits of a bf16 number, uint16."""
    field = np.int16((bits >> np.uint16(7)) & np.uint16(255))
    exponent = np.int8(min(max(field, np.int16(1)), np.int16(NOT_FINITE + 127)) - np.int16(127))
    return np.int8(NO_EXPONENT) if np.uint16(bits << np.uint16(1)) == 0 else exponent


@cpu_loop
def _copy(source: Any, first_i: Any, i_s: Any, first_j: Any, j_s: Any, to: Any) -> None:
    """to[i, j] = source[first_i + i, first_j + j], along the dimension of `source` that has no gaps."""
    if source.strides[0] >= source.strides[1]:
        for i in range(i_s):
            line, into = source[first_i + i][first_j : first_j + j_s], to[i]
            for j in range(j_s):
                into[j] = line[j]
    else:
        lines, whole_i, whole_j = source.T, i_s // SQUARE * SQUARE, j_s // SQUARE * SQUARE
        for j in range(0, whole_j, SQUARE):
            for i in range(0, whole_i, SQUARE):
                transpose(lines, first_j + j, first_i + i, to, i, j)  # type: ignore[call-arg]
        for j in range(j_s):
            for i in range(whole_i if j < whole_j else 0, i_s):
                to[i, j] = lines[first_j + j, first_i + i]


@cpu_loop
def split_rows(bits: Any) -> Any:
    """[m, k] bits of bf16 → `Rows`, with k padded to a multiple of STEP by zeros."""
    m, k = bits.shape
    steps = (k + STEP - 1) // STEP
    values = np.empty((m, steps * STEP), np.float32)
    words = values.view(np.uint32)
    exponents = np.empty((m, steps * STEP), np.int8)
    highest = np.empty((m, steps), np.int8)
    part = np.zeros((BLOCK, steps * STEP), np.uint16)
    for i in range(m):
        if i % BLOCK == 0:
            _copy(bits, i, min(BLOCK, m - i), np.int64(0), k, part)
        source, word, exponent = part[i % BLOCK], words[i], exponents[i]
        for t in range(steps * STEP):
            word[t] = np.uint32(source[t]) << np.uint32(16)
            exponent[t] = _exponent(source[t])
        for t in range(steps):
            highest[i, t] = NO_EXPONENT
            for power in exponent[t * STEP : (t + 1) * STEP]:
                highest[i, t] = max(highest[i, t], power)
    return values, exponents, highest


@cpu_loop
def split_panels(bits: Any) -> Any:
    """[k, n] bits of bf16 → `Panels`, with k and n padded to multiples of STEP and WIDE by zeros.

    Zeros have the exponent of 1 in the steps before a column's first other number: there any top gives a zero, and
    `step` leaves none of them out.
    """
    k, n = bits.shape
    steps, panels = (k + STEP - 1) // STEP, (n + WIDE - 1) // WIDE
    values = np.empty((panels, steps * STEP, WIDE), np.float32)
    exponents = np.empty((panels, steps * STEP, WIDE), np.int8)
    highest = np.empty((panels, steps), np.int8)
    most = np.empty(WIDE, np.int8)
    for panel in range(panels):
        most[:] = NO_EXPONENT
        _split_panel(bits, np.int64(0), k, panel * WIDE, most, values[panel], exponents[panel], highest[panel])
    return values, exponents, highest


@cpu_loop
def _split_panel(
    bits: Any, first_k: Any, k: Any, first: Any, most: Any, values: Any, exponents: Any, highest: Any
) -> None:
    """Split k numbers of each of WIDE columns, from number `first_k` of column `first` on, into one of `Panels`.

    most: the highest exponent of each column so far, [WIDE] int8.
    """
    width = min(WIDE, bits.shape[1] - first)
    part, top, least = np.zeros((TRANSPOSED, WIDE), np.uint16), np.empty(WIDE, np.int8), np.int8(NO_EXPONENT)
    for start in range(0, (k + STEP - 1) // STEP * STEP, STEP):
        at = start % TRANSPOSED
        if at == 0:
            if start + TRANSPOSED > k:
                part[:] = np.uint16(0)
            _copy(bits, first_k + start, min(TRANSPOSED, k - start), first, width, part)
        top[:] = NO_EXPONENT
        for t in range(STEP):
            for j in range(0, WIDE, LANES):
                split(part, at + t, j, values, exponents, start + t, top)  # type: ignore[call-arg]
        highest[start // STEP] = NO_EXPONENT
        for power in top:  # numba takes a second to compile top.max()
            highest[start // STEP] = max(highest[start // STEP], power)
        if least != NO_EXPONENT:
            continue
        least = np.int8(NOT_FINITE)
        for j in range(WIDE):
            most[j] = max(most[j], top[j])
            least = min(least, most[j])
        if least == NO_EXPONENT:
            for j in range(WIDE):
                if most[j] == NO_EXPONENT:
                    exponents[start : start + STEP, j] = 0


@cpu_loop
def _add_bf16(
    out: Any, first: Any, last: Any, parts: Any, a: Any, ea: Any, ha: Any, b: Any, kept: Any, adds: Any
) -> None:
    """Compute blocks of the result: all columns of a shard's panel and one of `parts` of the rows.

    out:         [shards, m, n] fp32, filled or, if `adds`, added to.
    first, last: of the blocks, which are numbered by shard, panel and part of the rows.
    a, ea, ha:   `Rows`; b: [k, n], bits of bf16.
    """
    shards, m, n = out.shape
    size, panels = b.shape[0] // shards, (n + WIDE - 1) // WIDE
    values, exponents = np.empty((DEPTH, WIDE), np.float32), np.empty((DEPTH, WIDE), np.int8)
    highest, most = np.empty(DEPTH // STEP, np.int8), np.empty(WIDE, np.int8)
    totals = np.empty((min(m, ROWS), WIDE), np.float32)
    for block in range(first, last):
        shard, panel, part = block // parts // panels, block // parts % panels, block % parts
        begin, end = m * part // parts, m * (part + 1) // parts
        width = min(WIDE, n - panel * WIDE)
        total, most[:] = totals[: end - begin], NO_EXPONENT
        total[:] = 0
        for start in range(0, size, DEPTH):
            k, at = min(DEPTH, size - start), shard * size + start
            padded = (k + STEP - 1) // STEP * STEP
            _split_panel(b, at, k, panel * WIDE, most, values, exponents, highest)
            operand = values[:padded], exponents[:padded], highest[: padded // STEP]
            zero = np.int64(0)
            lanes = zero, zero, zero, zero, width
            add_steps(total, zero, a[begin:end], ea[begin:end], ha[begin:end], at, *operand, lanes, kept)
        for i in range(end - begin):
            row = out[shard, begin + i, panel * WIDE : panel * WIDE + width]
            for j in range(width):
                row[j] = total[i, j] + row[j] if adds else total[i, j]


@cpu_loop
def add_steps(
    out: Any, column: Any, a: Any, ea: Any, ha: Any, at: Any, b: Any, eb: Any, hb: Any, lanes: Any, kept: Any
) -> None:
    """Add the products of all rows with one panel.

    out:       [m, columns] fp32, accumulators, of earlier steps or zeros, of columns `column` … column + WIDE - 1.
    a, ea, ha: `Rows`, from k = `at` on, a multiple of STEP; b, eb: [k, WIDE]; hb: [k / STEP].
    lanes:     r, s, from, t, to: row i at step k needs the lanes r i + s k + from … t k + to - 1 at least; every other
               product is zero.
    """
    of_row, of_step, start, to_step, end = lanes
    fast = np.empty(BLOCK, np.bool_)
    for block in range(0, a.shape[0], BLOCK):
        for i in range(block, min(block + BLOCK, a.shape[0])):
            row = out[i, column : column + WIDE].view(np.int32)
            largest = np.int32(0)
            for j in range(WIDE):
                largest = max(largest, row[j] & np.int32(0x7FFFFFFF))
            fast[i - block] = largest < MOST_BEFORE
        for k in range(0, b.shape[0], STEP):
            high = min(to_step * k + end, WIDE)
            for i in range(block, min(block + BLOCK, a.shape[0])):
                most_a, most_b = ha[i, (at + k) // STEP], hb[k // STEP]
                # Each by itself too: an infinity times a zero is NaN, whose exponents add up to little.
                finite = most_a < NOT_FINITE and most_b < NOT_FINITE
                fast[i - block] = fast[i - block] and most_a <= MOST_FAST and most_b <= MOST_FAST
                if finite and (most_a == NO_EXPONENT or most_b == NO_EXPONENT):
                    continue
                row = out[i, column : column + WIDE]
                for group in range(max(of_row * i + of_step * k + start, 0) // LANES * LANES, high, LANES):
                    pending = np.int64(-1)
                    if fast[i - block]:
                        pending = step(row, a, ea, b, eb, i, at + k, k, group, kept)  # type: ignore[call-arg]
                    if pending != 0:
                        _add_exactly(row, pending, a[i], at + k, b, k, group, kept)


@cpu_loop
def _add_exactly(row: Any, pending: Any, a: Any, at: Any, b: Any, k: Any, group: Any, kept: Any) -> None:
    """Compute a step of those of LANES accumulators whose bit is set in `pending`."""
    bits = row.view(np.int32)
    for lane in range(LANES):
        if (pending >> lane) & 1:
            bits[group + lane] = _exact_step(a, at, b, group + lane, k, bits[group + lane], kept)


@cpu_loop
def _exact_step(row: Any, at: Any, rows: Any, j: Any, k: Any, before: Any, kept: Any) -> Any:
    """One step of one element by the definition. row: [k], from `at` on; rows: [k, WIDE]; before: bits of the
    accumulator, as the result."""
    a, b = row[at : at + STEP].view(np.int32), rows[k : k + STEP].view(np.int32)
    is_finite, bits = _infinite_sum(a, b, j, before)
    if not is_finite:
        return bits
    size, exponent = _split_fp32(before)
    top = max(np.int64(LEAST_TOP), exponent) if size != 0 else np.int64(LEAST_TOP)
    for t in range(STEP):
        x, ex = _split_fp32(a[t])
        y, ey = _split_fp32(b[t, j])
        if x != 0 and y != 0:
            top = max(top, ex + ey)
    unit = top - kept
    total = _cut(size, exponent - 23 - unit)
    for t in range(STEP):
        x, ex = _split_fp32(a[t])
        y, ey = _split_fp32(b[t, j])
        total += _cut((x >> 16) * (y >> 16), ex + ey - 14 - unit)
    return _fp32_bits(total, unit)


@njit(inline="always")
def _infinite_sum(a: Any, b: Any, j: Any, before: Any) -> Any:
    """Whether the accumulator and all products of a step are finite; otherwise the bits of their sum."""
    size = np.int64(before) & 0x7FFFFFFF
    above, below, unknown = before == INFINITE, size == INFINITE and before < 0, size > INFINITE
    for t in range(STEP):
        x, y = np.int64(a[t]) & 0x7FFFFFFF, np.int64(b[t, j]) & 0x7FFFFFFF
        if max(x, y) >= INFINITE:
            unknown |= max(x, y) > INFINITE or min(x, y) == 0
            negative = (a[t] < 0) != (b[t, j] < 0)
            above |= not negative
            below |= negative
    if unknown or (above and below):
        return False, np.int32(NAN)
    if above or below:
        return False, np.int32(INFINITE) if above else np.int32(-0x800000)
    return True, np.int32(0)


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
        word = np.int64(INFINITE)
    return np.int32(word | -0x80000000) if total < 0 else np.int32(word)


@cpu_loop
def _add_fp32(a: Any, b: Any, out: Any) -> None:
    """Add by fma, for every k in order, to `out`, [m, n] fp32 zeros. a: [m, k], b: [k, n], contiguous fp32."""
    m, k = a.shape
    n = b.shape[1]
    bits = out.view(np.uint32)
    for i in range(m):
        for t in range(k):
            x = a[i, t]
            for j in range(n):
                out[i, j] = fma(x, b[t, j], out[i, j])  # type: ignore[call-arg]  # numba passes the context
        for j in range(n):
            if (bits[i, j] & np.uint32(0x7FFFFFFF)) > np.uint32(INFINITE):
                bits[i, j] = np.uint32(NAN)
