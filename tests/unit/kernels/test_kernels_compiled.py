# SPDX-License-Identifier: Apache-2.0
"""Kernels that Triton's interpreter cannot run are at least compiled, for Hopper and Blackwell, without a GPU. The
binary of the restarting product, compiled for sm_90 without a GPU: what it computes, and what it takes.
"""

import itertools
import re
import subprocess
from collections import Counter

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.unit.kernels.compiled import ptx
from tp_invariant_recipes.kernels import clipped_adam, cross_entropy, delta_rule
from tp_invariant_recipes.kernels.gemm import grouped_gemm, mxfp8, segmented_k_kernel
from tp_invariant_recipes.kernels.gemm import segmented_k_gemm as kernel
from tp_invariant_recipes.kernels.gemm.fp8_tiles import UNFUSED
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.launch import Kernel
from tp_invariant_recipes.portable.ieee.adam import CLIPPED

# kernel -> types of its tensors, its numbers, its constants
KERNELS = {
    cross_entropy.SUM: (
        {"logits": "*bf16", "highest": "*fp32", "partials": "*fp32"},
        ("rows", "size"),
        {"SHARD": 19000, "ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
    cross_entropy.GRADIENT: (
        dict.fromkeys(("highest", "total", "gradient"), "*fp32") | {"index": "*i64", "logits": "*bf16", "out": "*bf16"},
        ("size",),
        {"ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
    cross_entropy.PROBABILITIES: (
        dict.fromkeys(("highest", "logarithm", "out"), "*fp32") | {"logits": "*bf16"},
        ("size",),
        {"ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
    cross_entropy.GREATER: (
        {"logits": "*bf16", "limit": "*fp32", "out": "*i64"},
        ("size",),
        {"ALIGNMENT": 8, "BLOCK": cross_entropy.BLOCK},
    ),
}


@pytest.mark.parametrize("architecture", (90, 100))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.kernel.__name__)
def test_it_compiles(kernel, architecture):
    tensors, numbers, constants = KERNELS[kernel]
    names = kernel.kernel.arg_names
    assert names == [*sorted(tensors, key=names.index), *numbers, *constants], "tensors, numbers, constants"
    types = tensors | dict.fromkeys(numbers, "i32")
    code = ptx(kernel.kernel, types, constants, architecture, num_warps=8, multiples_of_16=tensors)
    assert ("ex2" in code) == (kernel in (cross_entropy.SUM, cross_entropy.GRADIENT))  # the exponential
    assert "ld.global.v4.b32" in code
    assert "ld.global.b16" not in code


@pytest.mark.parametrize("architecture", (90, pytest.param(100, marks=pytest.mark.release)))
@pytest.mark.parametrize("groups, separate", ((True, 0), (False, 0), (False, mxfp8.VECTOR)))
def test_rounding_to_mxfp8_keeps_subnormal_numbers(architecture, groups, separate):
    """And reads and writes 16 bytes at once."""
    kernel = mxfp8.KERNEL.kernel
    names = kernel.arg_names
    constants = dict(zip(names[7:], (groups, separate, True, True, *mxfp8.TYPES[mxfp8.E4M3], 4), strict=True))
    types = dict.fromkeys(names[:3], "*bf16") | dict.fromkeys(names[3:5], "*i64") | dict.fromkeys(names[5:7], "i32")
    code = ptx(kernel, types, constants, architecture, multiples_of_16=names[:5], **mxfp8.KERNEL.options)
    assert "mul.rn.f32" in code
    assert "ftz" not in code
    assert "ld.global.v4.b32" in code
    assert "st.global.v4.b32" in code
    assert "st.global.b16" not in code


@pytest.mark.parametrize("update", (clipped_adam.LIBRARY, CLIPPED), ids=("library", "portable"))
def test_a_step_of_adam_reads_and_writes_16_bytes_and_fuses_nothing_unasked(update):
    names = clipped_adam._clipped_adam.arg_names
    constants = {"CLIPS": True, "CHUNK": clipped_adam.CHUNK, "BLOCK": clipped_adam.BLOCK, "UPDATE": update.function}
    code = ptx(clipped_adam._clipped_adam, {"table": "*i64"} | dict.fromkeys(names[1:-4], "fp32"), constants, **UNFUSED)
    assert code.count("ld.global.v4.b32") == code.count("st.global.v4.b32") == 8
    assert code.count("st.global.v2.b32") == 2  # of bf16
    assert "fma.rn.f32" not in code
    assert ("ftz" in code) == ("approx" in code) == (update is clipped_adam.LIBRARY)


DELTA_RULE = [kernel for kernel in vars(delta_rule).values() if isinstance(kernel, Kernel)]


# ptxas takes seconds for each of these.
LONG = {"_delta_gradients", "_delta_systems", "_delta_state_gradients"}


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, marks=pytest.mark.release) if kernel.kernel.__name__ in LONG else kernel
        for kernel in DELTA_RULE
    ],
    ids=lambda kernel: kernel.kernel.__name__,
)
def test_products_of_the_gated_delta_rule_are_fp32(kernel):
    names = kernel.kernel.arg_names
    sizes = (*delta_rule._constants(delta_rule.Heads(1, 2, 20, 12)), delta_rule.PASSED[0])
    constants = dict(zip(filter(str.isupper, names), sizes, strict=False))
    types = dict.fromkeys(names, "*fp32") | {"size": "i32", "batch": "i32"}
    types |= {name: "*bf16" for name in ("x", "y", "dx") if name in names}
    code = ptx(kernel.kernel, types, constants, num_warps=4, num_stages=2)
    assert "tf32" not in code
    assert "ftz" not in code


ARITHMETIC = re.compile(r"(wgmma\.mma_async|(?:fma|mul|add|sub)\S*(?=\.f32))")
NUMBERS = kernel.TILE * kernel.TILE // (32 * kernel.WARPS)  # of both halves of a tile that a thread of each holds
BF16, FP32 = torch.bfloat16, torch.float32
OF_TENSORS, OF_BLOCKS = segmented_k_kernel.OF_TENSORS.value, segmented_k_kernel.OF_BLOCKS.value
NAMES = {E4M3: "fp8e4nv", E5M2: "fp8e5", BF16: "bf16", FP32: "fp32"}


def short_first(rows, short):
    return [row if row in short else pytest.param(*row, marks=pytest.mark.release) for row in rows]


# Pieces, whether b lies by columns, the output's type, whether the sum is added to it.
BINARIES = tuple(
    (pieces, transposed, out, add)
    for pieces, transposed in itertools.product(kernel.PIECES, (False, True))
    for out, add in ((BF16, False), (FP32, False), (FP32, True))
)


@pytest.mark.parametrize(
    "pieces, transposed, out, add", short_first(BINARIES, ((2, False, FP32, False), (4, True, BF16, False)))
)
def test_the_binary_adds_whole_pieces_and_nothing_else(pieces, transposed, out, add, tmp_path):
    """Products by tensor cores, and one addition a number between pieces; a piece begins outside its loop."""
    result = arithmetic(compiled_binary(pieces, out=out, transposed=transposed, add=add), tmp_path)
    assert result.pop("wgmma.mma_async") == 2 * (1 + 2 * pieces) * kernel.STEP_BYTES // 32  # both halves of the rows
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
def test_the_binary_of_fp8_promotes_every_block(pieces, scaled, dtype, out, add, tmp_path):
    """Four instructions a block of 128; then an addition a number, or with scales of blocks an FMA, and no other."""
    result = arithmetic(compiled_binary(pieces, dtype, out, scaled=scaled, add=add), tmp_path)
    promoted, between = pieces * NUMBERS, (pieces - 1 + add) * NUMBERS
    assert result.pop("wgmma.mma_async") == 2 * pieces * 4
    scales = 2 * pieces  # products of two, for each half; of blocks, also for two rows of a thread
    if scaled == OF_TENSORS:
        assert result == {"add.rn": promoted + between, "mul.rn": promoted + scales}
    else:
        assert result == {"fma.rn": promoted, "add.rn": between, "mul.rn": 2 * scales}


def arithmetic(binary, tmp_path):
    """How often the binary has which operation; it takes no more registers and shared memory than there are.

    And the assembler does not let tensor cores wait after each instruction, because something else reads their sums.
    """
    (code := tmp_path / "kernel.ptx").write_text(binary.asm["ptx"])
    assembler = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", "--fmad=false", code, "-o", tmp_path / "kernel"]
    said = subprocess.run(assembler, capture_output=True, text=True, check=True).stderr
    assert "Used 168 registers" in said
    assert "serialized" not in said
    assert binary.metadata.shared <= 227 * 1024
    granted = [int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", binary.asm["ptx"])]
    others = segmented_k_kernel.SECOND_REGISTERS.value + segmented_k_kernel.COPYING_REGISTERS.value
    assert granted[:2] == [256, 240]  # the first group's, alone and while the others work
    assert granted[1] + others <= 3 * 168
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
        "spare": "*fp32",
    }
    constants = {
        "PIECES": pieces,
        "SEGMENTS": 1,
        "SIZE": 512,
        "TRANSPOSED": transposed,
        "SCALED": scaled,
        "ADD": add,
        "STAGES": kernel.stages(pieces, dtype, out),
        "GROUP": kernel.GROUP,
    }
    names = [*types, *constants]
    source = GluonASTSource(
        kernel._restarting_product,
        types | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("out_at", "sa", "sb", "taken", "n", "row_size", "start", "segment", "spare")
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS, **UNFUSED})


def test_copied_tiles_of_experts_are_multiplied_by_the_same_steps_of_k():
    """Hopper's tensor cores take 16 numbers of k at a time, whatever fetches them and however wide the tile is."""
    pointers = ("x", "weights", "out", "offsets", "group", "first", "ends")
    types = dict(zip(pointers, ("*bf16",) * 3 + ("*i64",) * 4, strict=True)) | {"rows": "i32"}
    shape = {"N": 1536, "K": 2048, "W_ROW": 1, "W_COLUMN": 2048, "ALIGNED": True}
    tiles = {"TILE_M": 128, "TILE_K": 64}
    codes = [
        ptx(
            grouped_gemm._product, types, shape | tiles | {"COPIES": copies, "TILE_N": width}, num_warps=8,
            num_stages=3, multiples_of_16=pointers,
        )
        for copies, width in ((False, 128), (True, 256))
    ]  # fmt: skip
    assert [{*re.findall(r"wgmma\.mma_async\S*n(\d+)k(\d+)", code)} for code in codes] == [
        {("128", "16")},
        {("256", "16")},
    ]
    assert ["cp.async.bulk.tensor" in code for code in codes] == [False, True]
