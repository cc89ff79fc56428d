# SPDX-License-Identifier: Apache-2.0
"""The product of fixed tiles: its plain torch, and what its kernel is compiled to. `interpreted.py` runs the kernel.
Tiles of grouped rows: each of one group, all rows in some tile; and those of a CUDA graph, which knows no sizes.
"""

import re

import pytest
import torch

from tests.operands import same_bits
from tests.unit.kernels.compiled import ptx
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import GROUP, TILES, _product, fixed_tile_gemm
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups

DTYPES = (torch.float32, torch.bfloat16)
RAGGED = ((1, 1, 1), (3, 5, 7), (130, 64, 96), (64, 33, 129), (128, 200, 64))  # m, k, n


def operands(m, k, n, dtype):
    generator = torch.Generator().manual_seed(m + k + n)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return a.to(dtype), b.to(dtype)


def layouts(matrix):
    """The same matrix by rows, by columns, and with gaps, which also leave it on an odd address."""
    wide = matrix.new_zeros(matrix.shape[0], matrix.shape[1] + 3)[:, 1:-2]
    yield from (matrix, matrix.t().contiguous().t(), wide.copy_(matrix))


def fixed_product(a, b, dtype=torch.float32):
    return fixed_tile_gemm(a, b, a.new_empty(a.shape[0], b.shape[1], dtype=dtype))


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_it_is_correct_and_rounds_once(shape, dtype, out):
    a, b = operands(*shape, dtype)
    wide = fixed_product(a, b)
    torch.testing.assert_close(wide.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert same_bits(fixed_product(a, b, out), wide.to(out))
    there = torch.randn(wide.shape).to(out)
    expected = (wide + there).to(out)
    assert same_bits(fixed_tile_gemm(a, b, there, add=True), expected)


def slices_are_products_of_slices(multiply, shape, dtype):
    a, b = operands(*shape, dtype)
    whole = multiply(a, b)
    return all(
        same_bits(multiply(a[rows], b[:, columns]), whole[rows, columns].contiguous())
        for rows in (slice(0, 1), slice(1, 3), slice(shape[0] // 3, None))
        for columns in (slice(0, 1), slice(2, 7), slice(shape[2] // 2, None))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_a_slice_of_the_product_is_the_product_of_slices(shape, dtype):
    assert slices_are_products_of_slices(fixed_product, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED[2:], ids=str)
def test_that_of_a_library_is_not(shape, dtype):
    """The control: as libraries do, it adds in another order where there are few rows. What torch.mm does depends on
    the machine.
    """

    def by_the_number_of_rows(a, b):
        first = a.shape[1] // (3 if len(a) < 20 else 2)
        return fixed_product(a[:, :first], b[:first]) + fixed_product(a[:, first:], b[first:])

    assert not slices_are_products_of_slices(by_the_number_of_rows, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_in_memory_changes_no_bit(dtype):
    a, b = operands(64, 33, 129, dtype)
    whole = fixed_product(a, b)
    for x in layouts(a):
        for y in layouts(b):
            for out in layouts(torch.zeros(64, 129)):
                assert same_bits(fixed_tile_gemm(x, y, out), whole)


def test_what_is_not_a_product_is_refused():
    a, b = operands(4, 5, 6, torch.float32)
    with pytest.raises(TypeError, match="both must be bf16, or both fp32"):
        fixed_tile_gemm(a, b.bfloat16(), torch.empty(4, 6))
    with pytest.raises(ValueError, match=r"\[4, 5\] and \[5, 6\] is not \[6, 4\]"):
        fixed_tile_gemm(a, b, torch.empty(6, 4))


# What Triton compiles another binary for: which arguments are 1, and whether the others are multiples of 16.
BINARIES = (
    (("a_column", "b_column"), True), (("a_row", "b_row"), True), (("a_column", "b_row", "m"), True),
    (("a_row", "b_column", "n"), False), (("m", "n"), True), ((), False),
)  # fmt: skip
ARITHMETIC = re.compile(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\S*|(?:fma|mul|add|sub)\S*\.f32\S*")


def arithmetic(dtype: torch.dtype, ones: tuple[str, ...], multiples: bool, architecture: int) -> list[str]:
    """The floating-point instructions of a binary, in order."""
    tile = TILES[dtype]
    fixed = {"ADD": True, "GROUP": GROUP, **{name: tile[name] for name in ("TILE_M", "TILE_N", "TILE_K")}}
    fixed |= dict.fromkeys(ones, 1)
    names = _product.arg_names
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("a", "b"), "*bf16" if dtype == torch.bfloat16 else "*fp32")
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
    if multiples:
        options["multiples_of_16"] = [name for name in names if name not in fixed]
    return ARITHMETIC.findall(ptx(_product, types | {"out": "*fp32"}, fixed, architecture, **options))


# Compiling the binaries of a row takes 5 s.
@pytest.mark.parametrize(
    "architecture, dtype",
    (
        (90, torch.bfloat16),
        pytest.param(100, torch.float32, marks=pytest.mark.release),
        pytest.param(90, torch.float32, marks=pytest.mark.release),
        pytest.param(100, torch.bfloat16, marks=pytest.mark.release),
    ),
    ids=str,
)
def test_every_binary_of_the_kernel_has_the_same_arithmetic(architecture, dtype):
    first, *others = (arithmetic(dtype, *binary, architecture) for binary in BINARIES)
    assert ("mma" if dtype == torch.bfloat16 else "fma") in " ".join(first)
    for other in others:
        assert other == first


SIZES = ((70, 0, 1, 130), (0, 0, 5, 0), (64, 128, 0, 64), (1, 1, 1, 1))


def tiles(groups, height):
    return [(g, start) for g, start in zip(*(x.tolist() for x in groups.tiles(height)), strict=True)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("height", (16, 64))
def test_tiles_have_all_rows_of_one_group_each(sizes, height):
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    expected = [(n, starts[n] + row) for n, size in enumerate(sizes) for row in range(0, size, height)]
    assert tiles(Groups(sizes, torch.tensor(sizes)), height) == expected
    captured = tiles(Groups((), torch.tensor(sizes), sum(sizes)), height)
    assert captured[: len(expected)] == expected
    assert all(start >= starts[n] + sizes[n] for n, start in captured[len(expected) :])


def test_joined_neighbours_are_one_group():
    """Tiles of two sources of an expert waste the rows of one last tile."""
    joined = Groups((3, 5, 4, 70), torch.tensor((3, 5, 4, 70))).joined(2)
    assert (joined.sizes, joined.counts.tolist()) == ((8, 74), [8, 74])
    assert tiles(joined, 64) == [(0, 0), (1, 8), (1, 72)]
    captured = Groups((), torch.tensor((3, 5, 4, 70)), 90).joined(2)
    assert captured.ends.tolist() == [8, 82]
    assert tiles(captured, 64)[:3] == tiles(joined, 64)


def test_no_more_rows_are_read_than_there_are():
    groups = Groups((), torch.tensor((3, 5, 4)), 9)
    assert groups.ends.tolist() == [3, 8, 9]
    assert Groups((3, 5, 4), groups.counts).ends.tolist() == [3, 8, 12]


def test_a_graph_has_tiles_for_any_sizes():
    """As many as rows can need: one group with all, and each with a row."""
    counts = (len(tiles(Groups((), torch.tensor(sizes), 200), 64)) for sizes in ((200, 0, 0), (66, 67, 67)))
    assert [*counts] == [6, 6]
    assert len(tiles(Groups((66, 67, 67), torch.tensor((66, 67, 67))), 64)) == 6
