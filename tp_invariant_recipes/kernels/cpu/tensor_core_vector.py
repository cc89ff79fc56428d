"""One step of the sum of kernels/tensor_core_sum.py for LANES columns of a row at once, in LLVM's vectors.

A numba loop leaves it to LLVM how many columns a vector holds and how many vectors are computed side by side. Here both
are stated; LLVM cuts the vectors into those of the processor.

The product of two bf16 numbers is exact in fp32; times unit = 2 ** (KEPT - top) it is exact again, and the conversion
to an integer cuts it toward zero. Sixteen terms fit 32 bits, and so does their sum with the accumulator, but for the
very largest. That sum is cut to 24 bits: it is rounded to fp32, and where that went away from zero, one unit in the
last place is taken back.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tp_invariant_recipes.kernels.tensor_core_sum import STEP

LANES = 64
LEAST_FAST = -100  # the exponent of top down to which fp32 and its scales reach
BIAS = 127
MOST = 2**31 - 2**26 - 66  # a sum of terms to which any accumulator can be added, and the total rounded, in 32 bits

_FP32, _INT32, _INT16 = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16)))


@intrinsic
def step(
    typing_context: Any, row: Any, a: Any, ea: Any, b: Any, eb: Any, i: Any, at: Any, k: Any, first: Any, kept: Any
) -> Any:
    """row[first + lane] += the products a[i, at + t] b[k + t, first + lane] for t = 0 … STEP - 1, and for all LANES.

    row:          [columns] fp32; a, ea: [m, k], b, eb: [k, columns]: values, fp32, and exponents, int16. Contiguous in
                  the last dimension, a, ea, b and eb in both.
    i, at, k, first: int64; kept: KEPT, int32.
    returns:      int64, a bit for each lane that is left as it was: its top is below 2 ** LEAST_FAST, or zero, or its
                  sum beyond MOST.
    """
    integers = (types.int64,) * 4
    signature = types.int64(row, a, ea, b, eb, *integers, types.int32)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args[:5]
        arrays = [context.make_array(kind)(context, builder, one) for kind, one in zip(kinds, arguments, strict=False)]
        return _step(builder, *arrays, *arguments[5:])

    return signature, code


def _all(value: int) -> Any:
    return ir.Constant(_INT32, [value] * LANES)


def _spread(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _all(0))


def _at(builder: Any, array: Any, i: Any, j: Any) -> Any:
    """The address of an element of a contiguous array of two dimensions."""
    place = builder.add(builder.mul(i, builder.extract_value(array.shape, 1)), j)
    return builder.gep(array.data, [place])


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=2 if kind == _INT16 else 4)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_signed(">", x, y), x, y)


def _size(builder: Any, x: Any) -> Any:
    return _larger(builder, x, builder.neg(x))


def _step(
    builder: Any, row: Any, a: Any, ea: Any, b: Any, eb: Any, i: Any, at: Any, k: Any, first: Any, kept: Any
) -> Any:
    address = builder.gep(row.data, [first])
    before = _load(builder, address, _FP32)
    places = [(builder.add(at, t), builder.add(k, t)) for t in map(ir.IntType(64), range(STEP))]
    terms_top = total = None
    for left, right in places:
        exponent = _spread(builder, builder.load(_at(builder, ea, i, left)))
        one = builder.add(exponent, _load(builder, _at(builder, eb, right, first), _INT16))
        terms_top = one if terms_top is None else _larger(builder, terms_top, one)
    terms_top = builder.add(builder.sext(terms_top, _INT32), _all(BIAS))
    bits = builder.bitcast(before, _INT32)
    field = builder.and_(builder.lshr(bits, _all(23)), _all(255))
    top = _larger(builder, field, terms_top)  # as the field of an fp32 number
    left_out = builder.sub(top, _all(LEAST_FAST + BIAS))  # here and below by its sign
    top = _larger(builder, top, _all(LEAST_FAST + BIAS))
    kept_too = builder.add(kept, ir.IntType(32)(2 * BIAS))
    unit = builder.bitcast(builder.shl(builder.sub(_spread(builder, kept_too), top), _all(23)), _FP32)
    back = builder.bitcast(builder.shl(builder.sub(top, _spread(builder, kept)), _all(23)), _FP32)
    for left, right in places:
        number = _spread(builder, builder.load(_at(builder, a, i, left)))
        exact = builder.fmul(number, _load(builder, _at(builder, b, right, first), _FP32))
        term = builder.fptosi(builder.fmul(exact, unit), _INT32)
        total = term if total is None else builder.add(total, term)
    left_out = builder.or_(left_out, builder.sub(_all(MOST), _size(builder, total)))
    total = builder.add(total, builder.fptosi(builder.fmul(before, unit), _INT32))
    size = _size(builder, total)
    near = builder.sitofp(size, _FP32)
    away = builder.icmp_signed(">", builder.fptosi(near, _INT32), size)
    word = builder.add(builder.bitcast(near, _INT32), builder.sext(away, _INT32))
    word = builder.or_(word, builder.and_(total, _all(-(2**31))))
    after = builder.fmul(builder.bitcast(word, _FP32), back)
    left_out = builder.icmp_signed("<", left_out, _all(0))
    builder.store(builder.select(left_out, before, after), builder.bitcast(address, _FP32.as_pointer()), align=4)
    return builder.bitcast(left_out, ir.IntType(LANES))
