"""The published scheme is one product of whole tensors, whatever is divided; test_linear.py has all layouts."""

import pytest
import torch

from tests.distributed.ranks import on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.numerics.layers.formats.gathered import GATHERED
from tp_invariant_recipes.numerics.layers.linear import linear

TOKENS, K, N, SEGMENTS, DEGREE = 16, 40, 24, 2, 4
DTYPES = (torch.float32, torch.bfloat16)


def _tensors(dtype):
    """Activations [s, b, k] and [s, b, n], and a weight [n, k] of SEGMENTS segments; n is N of each."""
    generator = torch.Generator().manual_seed(5)
    shapes = (TOKENS, 1, K), (TOKENS, 1, SEGMENTS * N), (SEGMENTS * N, K)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _column_dgrad(mesh, dtype, segments):
    """The gradient of a column-parallel layer's input, all tokens of it."""
    x, dy, weight = _tensors(dtype)
    x.requires_grad_()
    local = sliced(weight, 0, mesh, SEGMENTS)
    y = linear.column_parallel(x, local, mesh, segments, False, GATHERED)
    y.backward(sliced(dy, 2, mesh, SEGMENTS))
    return x.grad[:, 0]


def _row_forward(mesh, dtype):
    """A row-parallel layer's output, from activations [s, b, n] and the weight transposed."""
    _, dy, weight = _tensors(dtype)
    slices = (dy.chunk(mesh.size, 2)[mesh.rank], weight.t().chunk(mesh.size, 1)[mesh.rank])
    return linear.row_parallel(*slices, mesh, False, GATHERED)[:, 0]


def _partial_sums(mesh, dtype):
    """The control: what row_parallel would be if ranks multiplied their slices and their products were added."""
    _, dy, weight = _tensors(dtype)
    parts = zip(dy[:, 0].chunk(mesh.size, 1), weight.chunk(mesh.size), strict=True)
    return sum(fixed_tile_product(a, b, torch.empty(TOKENS, K)) for a, b in parts).to(dtype)


def _everything(mesh):
    return {
        d: (_column_dgrad(mesh, d, SEGMENTS), _row_forward(mesh, d), _column_dgrad(mesh, d, 1), _partial_sums(mesh, d))
        for d in DTYPES
    }


@pytest.fixture(scope="module")
def results():
    return on_ranks(DEGREE, 8, _everything)


def _whole_product(dtype):
    _, dy, weight = _tensors(dtype)
    return fixed_tile_product(dy[:, 0], weight, torch.empty(TOKENS, K, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_sharded_features_are_one_product_of_whole_tensors(results, dtype):
    for column, row, *_ in (rank[dtype] for rank in results):
        assert same_bits(column, _whole_product(dtype))
        assert same_bits(row, _whole_product(dtype))


def test_in_the_order_of_ranks_rows_they_are_not(results):
    """The control for segments: the right numbers, in another order."""
    _, _, interleaved, _ = results[0][torch.float32]
    whole = _whole_product(torch.float32)
    torch.testing.assert_close(interleaved, whole)
    assert not same_bits(interleaved, whole)


def test_sums_of_ranks_products_are_not(results):
    *_, sums = results[0][torch.float32]
    whole = _whole_product(torch.float32)
    torch.testing.assert_close(sums, whole)
    assert not same_bits(sums, whole)


def test_tokens_that_ranks_do_not_divide_are_refused():
    def uneven(mesh):
        x = torch.ones(3, 1, 4)
        linear.row_parallel(x, torch.ones(4, 4), mesh, True, GATHERED)

    with pytest.raises(RuntimeError, match="2 ranks do not divide 3 tokens"):
        on_ranks(2, 2, uneven)
