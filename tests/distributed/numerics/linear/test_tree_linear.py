"""Column- and row-parallel products, by tree and by gather: one result for every tensor-parallel degree."""

import functools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import joined, on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.formats.gathered import GATHERED
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS = 8
DEGREES = (2, 4, pytest.param(8, marks=pytest.mark.release))  # compared with 1
S, B, K, N = 16, 2, 64, 96


def _tensors(dtype, segments=1):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(S, B, K, generator=generator).to(dtype)
    column = torch.randn(segments * N, K, generator=generator).to(dtype)
    return x, column, torch.randn(S, B, column.shape[0], generator=generator).to(dtype)


def _column(operands, mesh, dtype, segments, sequence_parallel, accumulate):
    x, weight, dy = _tensors(dtype, segments)
    local = sliced(weight, 0, mesh, segments).requires_grad_()
    if accumulate:
        local.main_grad = torch.zeros(local.shape)
    inputs = (x.chunk(mesh.size)[mesh.rank] if sequence_parallel else x).clone().requires_grad_()
    for _ in range(2 if accumulate else 1):
        y = linear.column_parallel(inputs, local, mesh, segments, sequence_parallel, operands)
        y.backward(sliced(dy, 2, mesh, segments))
    return y.detach(), inputs.grad, local.main_grad if accumulate else local.grad


def _row(operands, mesh, dtype, sequence_parallel, accumulate):
    dy, weight, x = _tensors(dtype)
    weight = weight.t().contiguous()
    local = sliced(weight, 1, mesh).requires_grad_()
    if accumulate:
        local.main_grad = torch.zeros(local.shape)
    inputs = sliced(x, 2, mesh).requires_grad_()
    for _ in range(2 if accumulate else 1):
        y = linear.row_parallel(inputs, local, mesh, sequence_parallel, operands)
        y.backward(dy.chunk(mesh.size)[mesh.rank] if sequence_parallel else dy)
    return y.detach(), inputs.grad, local.main_grad if accumulate else local.grad


def _stock_row(mesh, dtype):
    _, weight, x = _tensors(dtype)
    local = weight.chunk(mesh.size)[mesh.rank]
    y = sliced(x, 2, mesh) @ local
    if mesh.group is not None:
        dist.all_reduce(y, group=mesh.group)
    return y


# Every case on one set of ranks: a fork costs more than what it computes.
DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = [(d, n, sp, acc) for d in DTYPES for n in (1, 2, 3) for sp in (False, True) for acc in (False, True)]
ROWS = [(d, sp, acc) for d in DTYPES for sp in (False, True) for acc in (False, True)]


def _everything(mesh, operands):
    return (
        {case: _column(operands, mesh, *case) for case in COLUMNS},
        {case: _row(operands, mesh, *case) for case in ROWS},
        {dtype: _stock_row(mesh, dtype) for dtype in DTYPES},
    )


@pytest.fixture(scope="module", params=(PLAIN, GATHERED), ids=("tree", "gather"))
def results(request):
    """Degree -> what each of its ranks computed, when a test asks for it."""
    return functools.cache(lambda degree: on_ranks(degree, SHARDS, _everything, request.param))


def _column_whole(ranks, case):
    _, segments, sequence_parallel, _ = case
    ys, dxs, dws = zip(*(rank[0][case] for rank in ranks), strict=True)
    dx = torch.cat(dxs) if sequence_parallel else dxs[0]
    assert sequence_parallel or all(same_bits(dx, other) for other in dxs)
    return joined(ys, 2, segments), dx, joined(dws, 0, segments)


def _row_whole(ranks, case):
    _, sequence_parallel, _ = case
    ys, dxs, dws = zip(*(rank[1][case] for rank in ranks), strict=True)
    y = torch.cat(ys) if sequence_parallel else ys[0]
    assert sequence_parallel or all(same_bits(y, other) for other in ys)
    return y, torch.cat(dxs, 2), torch.cat(dws, 1)


def _same(a, b):
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", COLUMNS, ids=str)
def test_column_parallel_has_one_result_for_all_degrees(results, case, degree):
    assert _same(_column_whole(results(1), case), _column_whole(results(degree), case))


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_row_parallel_has_one_result_for_all_degrees(results, case, degree):
    assert _same(_row_whole(results(1), case), _row_whole(results(degree), case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequence_parallelism_changes_no_bit(results, dtype):
    assert _same(_row_whole(results(4), (dtype, True, True)), _row_whole(results(4), (dtype, False, True)))
    assert _same(_column_whole(results(4), (dtype, 2, True, True)), _column_whole(results(4), (dtype, 2, False, True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_agree_with_an_fp64_reference(results, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    x, weight, dy = (v.double() for v in _tensors(dtype))
    column = (x @ weight.t(), dy @ weight, dy.flatten(0, 1).t() @ x.flatten(0, 1))
    row = (dy @ weight, x @ weight.t(), x.flatten(0, 1).t() @ dy.flatten(0, 1))
    for got, expected in (
        *zip(_column_whole(results(2), (dtype, 1, True, False)), column, strict=True),
        *zip(_row_whole(results(2), (dtype, True, False)), row, strict=True),
    ):
        assert (got.double() - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_row_parallel_does_not(results, dtype):
    assert not same_bits(results(1)[0][2][dtype], results(4)[0][2][dtype])


def test_logits_may_be_changed_in_place():
    """As Megatron's own cross entropy does in fp32."""
    x, weight = torch.randn(8, 2, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    y = linear.column_parallel(x, weight, VirtualMesh(4, 1, 0), 1, False)
    y.mul_(2.0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.detach().sum(0).expand_as(x))
