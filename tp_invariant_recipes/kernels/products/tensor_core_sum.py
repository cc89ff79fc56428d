"""What a product of matrices is: the sum that a Hopper tensor core computes, as arithmetic that any computer can do.

bf16 operands. The sum walks k in steps of 16; operands beyond the end of k are zeros. Each step adds 16 products and
the accumulator, which starts at +0:

    exponent(x)  of a bf16 or fp32 number is its exponent field minus 127; a subnormal has -126
    top          the largest of: exponent(a) + exponent(b) of every product that is not zero, with the product itself
                 not normalised; the exponent of the accumulator, unless it is zero; LEAST_TOP
    unit         2 ** (top - KEPT_BITS)
    each of the 17 terms is cut toward zero to a multiple of unit; the cut terms are added exactly
    the sum is cut toward zero to fp32, subnormals included: the new accumulator

A sum that is cut to zero is +0, whatever its sign. A sum beyond fp32 is an infinity, and stays one. A product with a
NaN, of zero and infinity, or infinities of both signs make NAN, and nothing changes it. A bf16 output is the last
accumulator, rounded to nearest even.

fp32 operands (TF32 is off): fma(a, b, accumulator) for every k in order, in IEEE fp32, from +0.

Within a step the sum is exact, so it has no order. A zero product changes nothing, so padding may be skipped.

Evidence: tests/data holds operands and outputs that an H200 gave, of `mma.sync` and `wgmma` (Triton, one and four
warps, tiles of k of 16, 32 and 64) and of cuBLAS; tests/unit/kernels/products/test_tensor_core_sum.py compares every
bit. docs/arithmetic.md says what is known of other GPUs. MMA-Sim (arXiv 2511.10909) models the same sum independently.

tests/definitions/tensor_core_sum.py states the definition in numpy. kernels/cpu/tensor_core_cpu.py computes it fast.
"""

STEP = 16  # products added at once
KEPT_BITS = 25  # bits kept below the largest exponent
LEAST_TOP = -133  # exponent of the smallest bf16 number
NAN = 0x7FFFFFFF
