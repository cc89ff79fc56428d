"""Biases: one gradient for every degree, with and without sequence parallelism; the plain sum beside it has several."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias

SHARDS, DEGREES = 8, (1, 2, 4, 8)
S, B, N = 48, 3, 40
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("column", "row", "row, sequence parallel")
CASES = [(kind, dtype, main_grad) for kind in KINDS for dtype in DTYPES for main_grad in (False, True)]


def _tensors(dtype):
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(shape, generator=generator).to(dtype) for shape in ((S, B, N), (N,), (S, B, N)))


def _mine(mesh, kind, dtype):
    y, bias, dy = _tensors(dtype)
    if kind == "column":
        y, bias, dy = (v.chunk(mesh.size, -1)[mesh.rank].contiguous() for v in (y, bias, dy))
    elif kind != "row":
        y, dy = (v.chunk(mesh.size)[mesh.rank] for v in (y, dy))
    return y.clone().requires_grad_(), bias.clone().requires_grad_(), dy


def _run(mesh, kind, dtype, main_grad):
    """Output, gradient of y, gradient of the bias."""
    y, bias, dy = _mine(mesh, kind, dtype)
    if main_grad:
        bias.main_grad = torch.zeros(bias.shape)
    for _ in range(2 if main_grad else 1):
        y.grad = None
        out = column_bias(y, bias) if kind == "column" else row_bias(y, bias, mesh, kind != "row")
        out.backward(dy)
    return out.detach(), y.grad, bias.main_grad if main_grad else bias.grad


def _plain(mesh, kind, dtype):
    """The bias gradient as in Megatron: autograd's sum of this rank's rows, then an all-reduce."""
    y, bias, dy = _mine(mesh, kind, dtype)
    (y + bias).backward(dy)
    if kind == "row, sequence parallel":
        dist.all_reduce(bias.grad)
    return bias.grad


def _everything(mesh):
    return {case: _run(mesh, *case) for case in CASES}, {(k, d): _plain(mesh, k, d) for k in KINDS for d in DTYPES}


@pytest.fixture(scope="module")
def results():
    """Degree -> what each of its ranks computed."""
    return {t: on_ranks(t, SHARDS, _everything) for t in DEGREES}


def _whole(ranks, case):
    y, dy, db = zip(*(rank[0][case] for rank in ranks), strict=True)
    if case[0] == "column":
        return torch.cat(y, -1), torch.cat(dy, -1), torch.cat(db)
    if case[0] == "row":
        assert all(same_bits(a, b) for parts in (y, dy, db) for a, b in ((part, parts[0]) for part in parts))
        return y[0], dy[0], db[0]
    assert not any(other.count_nonzero() for other in db[1:])
    return torch.cat(y), torch.cat(dy), torch.stack(db).sum(0)


@pytest.mark.parametrize("degree", DEGREES[1:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_result_for_all_degrees(results, case, degree):
    first, other = _whole(results[1], case), _whole(results[degree], case)
    assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("main_grad", (False, True))
def test_sequence_parallelism_changes_no_bit(results, dtype, main_grad):
    with_it, without = (_whole(results[4], (kind, dtype, main_grad)) for kind in (KINDS[2], KINDS[1]))
    assert all(same_bits(a, b) for a, b in zip(with_it, without, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_an_fp64_reference(results, case):
    _, dtype, main_grad = case
    y, bias, dy = (v.double() for v in _tensors(dtype))
    out, dy_back, db = _whole(results[4], case)
    assert same_bits(out, (y + bias).to(dtype))
    assert same_bits(dy_back, dy.to(dtype))
    exact, rounding = dy.sum((0, 1)) * (2 if main_grad else 1), 2.0**-24 * dy.abs().sum((0, 1))
    assert ((db.double() - exact).abs() <= 16 * rounding + exact.abs() * (torch.finfo(db.dtype).eps)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_sum_depends_on_the_degree(results, dtype):
    single, eight = (results[t][0][1][KINDS[2], dtype] for t in (1, 8))
    assert not same_bits(single, eight)
