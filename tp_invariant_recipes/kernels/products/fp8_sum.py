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

Evidence: tests/data holds what cuBLAS gave on an H200 and an H100; tests/unit/kernels/products/test_fp8_sum.py compares
every bit. cuBLAS also has "fast accumulation": one accumulator over all of k. No product of ours uses it.

tests/definitions/fp8_sum.py states the definition in numpy. kernels/cpu/fp8_cpu.py computes it fast.
"""

from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2, Quantized

STEP = 32  # products added at once
KEPT_BITS = 13  # bits kept below the largest exponent, and below the leading one of an accumulator
PROMOTED = 128  # products of an accumulator, before it enters `main`
LEAST = {E4M3: -6, E5M2: -14}  # exponent of the smallest normal number, and of subnormal ones


def kind(a: Quantized, b: Quantized) -> str:
    """Return the blocks of b, which name the products: "tensor", "1x128" or "128x128".

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
