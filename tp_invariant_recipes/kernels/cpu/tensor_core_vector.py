# SPDX-License-Identifier: Apache-2.0
"""One step of the sum of kernels/gemm/segmented_k_gemm.py for LANES columns of a row at once, in LLVM's vectors.

A numba loop leaves it to LLVM how many columns a vector holds and how many vectors are computed side by side. Here both
are specified; LLVM cuts the vectors into those of the processor.

The product of two bf16 numbers is exact in fp32; times unit = 2 ** (KEPT_BITS - top) it is exact again, and the
conversion to an integer cuts it toward zero. Sixteen terms fit 32 bits, and so does their sum with the accumulator,
but for the very largest. That sum is cut to 24 bits: a processor with AVX-512 cuts where it converts. Others round to
nearest, and where that went away from zero, one unit in the last place is taken back.

Exponents are bytes, of which a vector has four times as many as of fp32. Their sums stop at -128 and 127.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tp_invariant_recipes.kernels.gemm.segmented_k_gemm import STEP

LANES = 64
SQUARE = 16  # rows and columns of what is transposed at once
LEAST_FAST = -100  # the exponent of top down to which fp32 and its scales reach
# Of an operand: so that products fit, and a zero's exponent, -128, stays below LEAST_FAST in every sum.
MOST_FAST = LEAST_FAST + 127
BIAS = 127
MOST = 2**31 - 2**26 - 66  # a sum of terms to which any accumulator can be added, and the total rounded, in 32 bits
VECTOR = 16  # fp32 numbers of AVX-512
TOWARD_ZERO = 11  # how AVX-512 is told to convert

_FP32, _INT32, _INT16, _INT8 = (
    ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8))
)


@intrinsic
def step(
    typing_context: Any, row: Any, a: Any, ea: Any, b: Any, eb: Any, i: Any, at: Any, k: Any, first: Any, kept: Any
) -> Any:
    """row[first + lane] += the products a[i, at + t] b[k + t, first + lane] for t = 0 … STEP - 1, and for all LANES.

    row:          [columns] fp32; a, ea: [m, k], b, eb: [k, columns]: values, fp32, and exponents, int8, at most
                  MOST_FAST; -128 of a zero. Contiguous in the last dimension, a, ea, b and eb in both.
    i, at, k, first: int64; kept: KEPT_BITS, int32.
    returns:      int64, a bit for each lane that is left as it was: its top is below 2 ** LEAST_FAST, or zero, or its
                  sum beyond MOST.
    """
    integers = (types.int64,) * 4
    signature = types.int64(row, a, ea, b, eb, *integers, types.int32)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args[:5]
        arrays = [
            context.make_array(kind)(context, builder, argument)
            for kind, argument in zip(kinds, arguments, strict=False)
        ]
        return _step(builder, _avx512(context), *arrays, *arguments[5:])

    return signature, code


@intrinsic
def split(typing_context: Any, bits: Any, i: Any, first: Any, values: Any, exponents: Any, k: Any, top: Any) -> Any:
    """Split LANES bf16 numbers, bits[i, first + lane], into values[k, first + lane] and exponents[k, first + lane].

    bits: [rows, columns] uint16; values: fp32, exponents: int8, both [k, columns]; all contiguous. Exponents are those
    of kernels/cpu/tensor_core_cpu.py: NOT_FINITE of the largest numbers, infinities and NaN, NO_EXPONENT of zeros.
    top:  [columns] int8: rises to the exponent of each column.
    """
    signature = types.void(bits, types.int64, types.int64, values, exponents, types.int64, top)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args
        source, into, powers, highest = (
            context.make_array(kinds[n])(context, builder, arguments[n]) for n in (0, 3, 4, 6)
        )
        i, first, k = arguments[1], arguments[2], arguments[5]
        word = _load(builder, _at(builder, source, i, first), _INT16)
        wide = builder.shl(builder.zext(word, _INT32), _all(16))
        builder.store(wide, builder.bitcast(_at(builder, into, k, first), _INT32.as_pointer()), align=4)
        field = builder.and_(builder.lshr(word, _all(7, _INT16)), _all(255, _INT16))
        field = _larger(builder, field, _all(1, _INT16))
        field = builder.select(builder.icmp_signed("<", field, _all(254, _INT16)), field, _all(254, _INT16))
        power = builder.trunc(builder.sub(field, _all(BIAS, _INT16)), _INT8)
        nothing = builder.icmp_unsigned("==", builder.shl(word, _all(1, _INT16)), _all(0, _INT16))
        power = builder.select(nothing, _all(-128, _INT8), power)
        builder.store(power, builder.bitcast(_at(builder, powers, k, first), _INT8.as_pointer()), align=1)
        place = builder.gep(highest.data, [first])
        builder.store(
            _larger(builder, _load(builder, place, _INT8), power), builder.bitcast(place, _INT8.as_pointer()), align=1
        )
        return context.get_dummy_value()

    return signature, code


@intrinsic
def transpose(typing_context: Any, source: Any, i: Any, j: Any, to: Any, k: Any, m: Any) -> Any:
    """Copy to[k + y, m + x] = source[i + x, j + y] for x, y = 0 … SQUARE - 1.

    source, to: uint16, contiguous in the last dimension.
    """
    signature = types.void(source, types.int64, types.int64, to, types.int64, types.int64)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, to = (context.make_array(signature.args[n])(context, builder, arguments[n]) for n in (0, 3))
        (i, j), (k, m) = arguments[1:3], arguments[4:6]
        line, half = ir.VectorType(ir.IntType(16), SQUARE), SQUARE // 2

        def address(array: Any, row: Any, offset: int, column: Any) -> Any:
            place = builder.mul(builder.add(row, ir.IntType(64)(offset)), builder.extract_value(array.strides, 0))
            start = builder.gep(builder.bitcast(array.data, ir.IntType(8).as_pointer()), [place])
            return builder.gep(builder.bitcast(start, ir.IntType(16).as_pointer()), [column])

        lines = [
            builder.load(builder.bitcast(address(source, i, x, j), line.as_pointer()), align=2) for x in range(SQUARE)
        ]
        mixed = [[n + SQUARE * side for n in range(start, start + half) for side in (0, 1)] for start in (0, half)]
        for _ in range(SQUARE.bit_length() - 1):
            pairs = zip(lines[:half], lines[half:], strict=True)
            lines = [builder.shuffle_vector(x, y, _numbers(order)) for x, y in pairs for order in mixed]
        for y, numbers in enumerate(lines):
            builder.store(numbers, builder.bitcast(address(to, k, y, m), line.as_pointer()), align=2)
        return context.get_dummy_value()

    return signature, code


def _avx512(context: Any) -> bool:
    """Whether numba compiles for a processor that has it."""
    _, _, features = context.codegen().magic_tuple()
    return "+avx512f" in features.split(",")


def _all(value: int, kind: Any = _INT32) -> Any:
    return ir.Constant(kind, [value] * LANES)


def _spread(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    vector = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(vector, vector, _all(0))


def _at(builder: Any, array: Any, i: Any, j: Any) -> Any:
    """Return the address of an element of a contiguous array of two dimensions."""
    place = builder.add(builder.mul(i, builder.extract_value(array.shape, 1)), j)
    return builder.gep(array.data, [place])


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1 if kind == _INT8 else 4)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _size(builder: Any, x: Any) -> Any:
    return _larger(builder, x, builder.neg(x))


def _declared(builder: Any, name: str, returned: Any, *taken: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(returned, taken), name)


def _mask(builder: Any, lanes: Any) -> Any:
    return builder.bitcast(lanes, ir.IntType(LANES))


def _step(
    builder: Any, avx512: bool, row: Any, a: Any, ea: Any, b: Any, eb: Any, i: Any, at: Any, k: Any, first: Any,
    kept: Any,
) -> Any:  # fmt: skip
    address = builder.gep(row.data, [first])
    before = _load(builder, address, _FP32)
    places = [(builder.add(at, t), builder.add(k, t)) for t in map(ir.IntType(64), range(STEP))]
    added = _declared(builder, f"llvm.sadd.sat.v{LANES}i8", _INT8, _INT8, _INT8)
    terms_top = None
    for in_a, in_b in places:
        exponent = _spread(builder, builder.load(_at(builder, ea, i, in_a)))
        power = builder.call(added, [exponent, _load(builder, _at(builder, eb, in_b, first), _INT8)])
        terms_top = power if terms_top is None else _larger(builder, terms_top, power)
    low = _mask(builder, builder.icmp_signed("<", terms_top, _all(LEAST_FAST, _INT8)))
    terms_top = _larger(builder, terms_top, _all(LEAST_FAST, _INT8))
    terms_top = builder.zext(builder.add(terms_top, _all(BIAS, _INT8)), _INT32)
    # From here on exponents are fields of fp32 numbers, in their place.
    field = builder.and_(builder.bitcast(before, _INT32), _all(0x7F800000))
    top = _larger(builder, field, builder.shl(terms_top, _all(23)))
    moved = _spread(builder, builder.shl(kept, ir.IntType(32)(23)))
    unit = builder.bitcast(builder.sub(builder.add(moved, _all(2 * BIAS << 23)), top), _FP32)
    back = builder.bitcast(builder.sub(top, moved), _FP32)
    total = None
    for in_a, in_b in places:
        number = _spread(builder, builder.load(_at(builder, a, i, in_a)))
        exact = builder.fmul(number, _load(builder, _at(builder, b, in_b, first), _FP32))
        term = builder.fptosi(builder.fmul(exact, unit), _INT32)
        total = term if total is None else builder.add(total, term)
    size = _size(builder, total)
    total = builder.add(total, builder.fptosi(builder.fmul(before, unit), _INT32))
    after = builder.fmul((_cut_at_once if avx512 else _cut)(builder, total), back)
    place = builder.bitcast(address, _FP32.as_pointer())
    large = _mask(builder, builder.icmp_signed(">", size, _all(MOST)))
    nothing = ir.IntType(LANES)(0)
    with builder.if_else(builder.icmp_unsigned("!=", builder.or_(low, large), nothing), likely=False) as (slow, none):
        with slow:
            small = _mask(builder, builder.icmp_signed("<", field, _all(LEAST_FAST + BIAS << 23)))
            omitted = builder.or_(builder.and_(low, small), large)
            lanes = builder.bitcast(omitted, ir.VectorType(ir.IntType(1), LANES))
            builder.store(builder.select(lanes, before, after), place, align=4)
            with_slow = builder.block
        with none:
            builder.store(after, place, align=4)
            with_none = builder.block
    result = builder.phi(ir.IntType(LANES))
    result.add_incoming(omitted, with_slow)
    result.add_incoming(nothing, with_none)
    return result


def _cut(builder: Any, total: Any) -> Any:
    """Integers as fp32, cut toward zero."""
    size = _size(builder, total)
    near = builder.sitofp(size, _FP32)
    away = builder.icmp_signed(">", builder.fptosi(near, _INT32), size)
    word = builder.add(builder.bitcast(near, _INT32), builder.sext(away, _INT32))
    return builder.bitcast(builder.or_(word, builder.and_(total, _all(-(2**31)))), _FP32)


def _cut_at_once(builder: Any, total: Any) -> Any:
    """As `_cut`, in one instruction of AVX-512."""
    whole, integers = (ir.VectorType(kind, VECTOR) for kind in (ir.FloatType(), ir.IntType(32)))
    name = f"llvm.x86.avx512.sitofp.round.v{VECTOR}f32.v{VECTOR}i32"
    convert = _declared(builder, name, whole, integers, ir.IntType(32))
    parts = []
    for first in range(0, LANES, VECTOR):
        part = builder.shuffle_vector(total, total, _numbers(range(first, first + VECTOR)))
        parts.append(builder.call(convert, [part, ir.IntType(32)(TOWARD_ZERO)]))
    while len(parts) > 1:
        places = _numbers(range(2 * parts[0].type.count))
        parts = [builder.shuffle_vector(x, y, places) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _numbers(places: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), [*places])
