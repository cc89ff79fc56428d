"""The binary of the restarting product, compiled for sm_90 without a GPU: what it computes, and what it takes."""

import itertools
import re
from collections import Counter

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel
from tp_invariant_recipes.kernels.gemm import segmented_k_kernel
from tp_invariant_recipes.kernels.gemm.fp8_tiles import UNFUSED
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2

ARITHMETIC = re.compile(r"(wgmma\.mma_async|(?:fma|mul|add|sub)\S*(?=\.f32))")
NUMBERS = kernel.TILE * kernel.TILE // (32 * kernel.WARPS)  # of both halves of a tile that a thread of each holds
BF16, FP32 = torch.bfloat16, torch.float32
OF_TENSORS, OF_BLOCKS = segmented_k_kernel.OF_TENSORS.value, segmented_k_kernel.OF_BLOCKS.value
NAMES = {E4M3: "fp8e4nv", E5M2: "fp8e5", BF16: "bf16", FP32: "fp32"}


def short_first(rows, short):
    return [row if row in short else pytest.param(*row, marks=pytest.mark.release) for row in rows]


# Pieces, whether b lies by columns, whether the sum is added to the output.
BINARIES = tuple(itertools.product(kernel.PIECES, (False, True), (False, True)))


@pytest.mark.release
@pytest.mark.parametrize("pieces, transposed, add", BINARIES)
def test_the_binary_adds_whole_pieces_and_nothing_else(pieces, transposed, add):
    """Products by tensor cores, and one addition a number between pieces."""
    result = arithmetic(compiled_binary(pieces, transposed=transposed, add=add))
    assert result.pop("wgmma.mma_async") == 2 * pieces * kernel.STEP_BYTES // 32  # both halves of the rows
    assert result == {"add.rn": (pieces - 1 + add) * NUMBERS}


# Pieces, what the scales are, a's type, the output's, whether the sum is added to it.
FP8 = tuple(
    (pieces, scaled, dtype, out, add)
    for pieces, scaled, dtype in itertools.product(kernel.PIECES, (OF_TENSORS, OF_BLOCKS), (E4M3, E5M2))
    for out, add in ((BF16, False), (FP32, False), (FP32, True))
)


@pytest.mark.parametrize(
    "pieces, scaled, dtype, out, add",
    short_first(FP8, ((2, OF_TENSORS, E5M2, FP32, True), (4, OF_BLOCKS, E4M3, BF16, False))),
)
def test_the_binary_of_fp8_promotes_every_block(pieces, scaled, dtype, out, add):
    """Four instructions a block of 128; then an addition a number, or with scales of blocks an FMA, and no other."""
    result = arithmetic(compiled_binary(pieces, dtype, out, scaled=scaled, add=add))
    promoted, between = pieces * NUMBERS, (pieces - 1 + add) * NUMBERS
    assert result.pop("wgmma.mma_async") == 2 * pieces * 4
    scales = 2 * pieces  # products of two, for each half; of blocks, also for two rows of a thread
    if scaled == OF_TENSORS:
        assert result == {"add.rn": promoted + between, "mul.rn": promoted + scales}
    else:
        assert result == {"fma.rn": promoted, "add.rn": between, "mul.rn": 2 * scales}


def arithmetic(binary):
    """How often the binary has which operation; it takes no more registers and shared memory than there are."""
    assert binary.metadata.shared <= 227 * 1024
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", binary.asm["ptx"])]
    others = segmented_k_kernel.SECOND_REGISTERS.value + segmented_k_kernel.COPYING_REGISTERS.value
    assert max(granted) + others <= 3 * 168
    return Counter(ARITHMETIC.findall(binary.asm["ptx"]))


def compiled_binary(pieces, dtype=BF16, out=FP32, scaled=segmented_k_kernel.UNSCALED.value, transposed=True, add=False):
    def descriptor(rows, columns, dtype):
        return f"tensordesc<{NAMES[dtype]}{[rows, columns]},{kernel.layout(rows, columns, dtype)!r}>"

    step = (kernel.TILE, kernel.STEP_BYTES // dtype.itemsize)
    types = {
        "a": descriptor(*step, dtype),
        "b": descriptor(*(step if transposed else reversed(step)), BF16 if dtype == BF16 else E4M3),
        "out": descriptor(kernel.ROWS, kernel.TILE, out),
        "out_at": f"*{NAMES[out]}",
        **dict.fromkeys(("sa", "sb"), "*fp32"),
        **dict.fromkeys(("sa_row", "sa_k", "sb_row", "sb_k"), "i32"),
        "taken": "*i32",
        **dict.fromkeys(("m", "n", "row_size", "start", "segment"), "i32"),
    }
    constants = {
        "PIECES": pieces,
        "SEGMENTS": 1,
        "SIZE": 512,
        "TRANSPOSED": transposed,
        "SCALED": scaled,
        "ADD": add,
        "STAGES": kernel.stages(pieces, out),
        "GROUP": kernel.GROUP,
    }
    names = [*types, *constants]
    source = GluonASTSource(
        kernel._restarting_product,
        types | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("out_at", "sa", "sb", "taken", "n", "row_size", "start", "segment")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS, **UNFUSED})
