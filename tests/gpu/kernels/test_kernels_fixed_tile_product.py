"""The product of fixed tiles on one GPU: no bit depends on what lies beside a row or a column, or on where it lies."""

import pytest
import torch

from tests.gpu.kernels.operands import normal_on_gpu
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.numerics.products import order

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
# m, k, n: Qwen3-0.6B and 8B with 2048 tokens (forward, input gradient, weight gradient), small and ragged ones.
SHAPES = (
    (2048, 1024, 6144), (2048, 6144, 1024), (6144, 2048, 1024), (2048, 12288, 4096), (16, 64, 24), (130, 200, 190),
    (1000, 515, 333),
)  # fmt: skip


def _operands(m, k, n, dtype):
    return normal_on_gpu(m, k, dtype=dtype), normal_on_gpu(k, n, dtype=dtype)


def _product(a, b, dtype=torch.float32):
    return fixed_tile_product(a, b, torch.empty(a.shape[0], b.shape[1], dtype=dtype, device="cuda"))


def _layouts(matrix):
    """By rows, by columns, either with gaps that leave rows on odd addresses, and with gaps that do not."""
    yield from (matrix, matrix.t().contiguous().t())
    rows, columns = matrix.shape
    for before, after in ((1, 2), (16, 16)):
        yield matrix.new_zeros(rows, before + columns + after)[:, before:-after].copy_(matrix)
        yield matrix.new_zeros(columns, before + rows + after)[:, before:-after].t().copy_(matrix)
    yield matrix.new_zeros(rows, columns, 2)[..., 0].copy_(matrix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_correct_and_rounds_once(shape, dtype):
    a, b = _operands(*shape, dtype)
    wide = _product(a, b)
    reference = a.double() @ b.double()
    assert (wide - reference).norm() < 1e-4 * reference.norm()  # tensor cores cut where others round
    assert same_bits(_product(a, b, torch.bfloat16), wide.bfloat16())
    there = torch.randn_like(wide)
    expected = wide + there
    assert same_bits(fixed_tile_product(a, b, there, add=True), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_slice_of_the_product_is_the_product_of_slices(shape, dtype):
    a, b = _operands(*shape, dtype)
    whole = _product(a, b)
    for parts in (2, 8):
        for n, (x, rows) in enumerate(zip(a.chunk(parts), whole.chunk(parts), strict=True)):
            assert same_bits(_product(x if n % 2 else x.clone(), b), rows)
        for n, (y, columns) in enumerate(zip(b.chunk(parts, 1), whole.chunk(parts, 1), strict=True)):
            assert same_bits(_product(a, y if n % 2 else y.clone()), columns)
    for rows in (slice(0, 1), slice(1, 3), slice(shape[0] // 3, None)):
        for columns in (slice(0, 1), slice(2, 7), slice(shape[2] // 2 + 1, None)):
            assert same_bits(_product(a[rows], b[:, columns]), whole[rows, columns])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[-4:], ids=str)
def test_the_layout_in_memory_changes_no_bit(shape, dtype):
    """Each of these is another binary."""
    a, b = _operands(*shape, dtype)
    whole = _product(a, b)
    for x in _layouts(a):
        for y in _layouts(b):
            assert same_bits(_product(x, y), whole)
    for out in _layouts(torch.zeros_like(whole)):
        assert same_bits(fixed_tile_product(a, b, out), whole)


def test_elements_beyond_two_to_the_31st_have_their_place():
    m, k, n = 50_000, 64, 50_048
    a, b = _operands(m, k, n, torch.bfloat16)
    whole = _product(a, b, torch.bfloat16)
    assert whole.numel() > 2**31
    for rows in (slice(0, 200), slice(m - 200, m)):
        assert same_bits(whole[rows], _product(a[rows], b, torch.bfloat16))
    there = whole.t()  # the same numbers by columns, as what is multiplied
    few = normal_on_gpu(8, n, dtype=torch.bfloat16)
    assert same_bits(_product(few, there)[:, -100:], _product(few, there[:, -100:].clone()))


def test_tiles_walk_k_in_order():
    """tests/unit/numerics/products/test_product_order.py shows that the check sees other orders."""
    order.require_order.cache_clear()
    order.require_order("cuda:0")
