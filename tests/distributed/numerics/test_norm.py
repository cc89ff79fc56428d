"""RMSNorm: the same bits for every degree, right, and the plain weight gradient beside it, which is not the same."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.kernels.folding_sum import folding_sum
from tp_invariant_recipes.numerics.layers.norm import NormShards, rms_norm
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

EPS = 1e-6
WHOLE, SLICE, HEADS = NormShards
SIZES = (1, 2, 4)
SHARDS = 8  # more than ranks: rank and shard have several of each other
DTYPES = (torch.float32, torch.bfloat16)
ALONE = VirtualMesh(1, 1, 0)


def mine(tensor: Tensor, mesh: VirtualMesh, shards_of: NormShards) -> Tensor:
    """This rank's slice, in memory of its own."""
    if shards_of is WHOLE:
        return tensor.clone()
    return tensor.chunk(mesh.size, 2 if shards_of is HEADS else 0)[mesh.rank].contiguous()


def inputs(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, dy."""
    torch.manual_seed(seed)
    return torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)


def step(mesh, shards_of, x, weight, dy) -> tuple[Tensor, Tensor, Tensor]:
    """Output, dx and weight gradient of one rank."""
    x, weight = mine(x, mesh, shards_of).requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(x, weight, EPS, mesh, shards_of)
    y.backward(mine(dy, mesh, shards_of))
    return y.detach(), x.grad, weight.grad


def plain_step(mesh, shards_of, x, weight, dy) -> tuple[Tensor, Tensor, Tensor]:
    """The same, the weight gradient as in Megatron: all rows of the rank, then an all-reduce."""
    x, weight = mine(x, mesh, shards_of).requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(x, weight, EPS, ALONE, WHOLE)
    y.backward(mine(dy, mesh, shards_of))
    dist.all_reduce(weight.grad)
    return y.detach(), x.grad, weight.grad if mesh.rank == 0 else torch.zeros_like(weight.grad)


def joined(case, ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Output, dx and weight gradient of all ranks put together."""
    if case[0] is WHOLE:
        assert all(same_bits(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
        return ranks[0]
    y, dx, dw = zip(*ranks, strict=True)
    assert not any(other.count_nonzero() for other in dw[1:])
    dim = 2 if case[0] is HEADS else 0
    return torch.cat(y, dim), torch.cat(dx, dim), torch.stack(dw).sum(0)


def unequal(first, other) -> list[str]:
    names = "output", "dx", "weight gradient"
    return [name for name, a, b in zip(names, first, other, strict=True) if not same_bits(a, b)]


def all_kinds(dtype, chunk, batch, shards, width, seed=0) -> list[tuple]:
    """One case for each member of NormShards; the first two are the same rows."""
    rows = inputs(dtype, (shards * chunk, batch, width), seed)
    return [(WHOLE, *rows), (SLICE, *rows), (HEADS, *inputs(dtype, (3, batch, shards * chunk, width), seed))]


def special(dtype) -> list[tuple]:
    """NaN, infinities and large numbers in all operands."""
    cases = all_kinds(dtype, 2, 2, SHARDS, 97)
    for _, x, weight, dy in cases:
        for row, value in enumerate((math.nan, math.inf, -math.inf, 1e30)):
            x.view(-1, 97)[4 * row, 7 * row] = value
            dy.view(-1, 97)[4 * row + 1, 9 * row] = value
        weight[5] = math.inf
    return cases


def zeros(dtype) -> list[tuple]:
    """Gradients of negative zeros."""
    shapes = ((WHOLE, (8, 1, 4)), (SLICE, (8, 1, 4)), (HEADS, (2, 1, 8, 4)))
    return [
        (kind, *(torch.full(s, v, dtype=dtype) for s, v in ((shape, 1), ((4,), 1), (shape, -0.0))))
        for kind, shape in shapes
    ]


def plain(dtype) -> list[tuple]:
    return all_kinds(dtype, 4, 2, SHARDS, 97)


MAKERS = (plain, special, zeros)


def everything(mesh) -> dict:
    """All on one set of ranks, since a fork costs more than what it computes."""
    results = {(make, dtype): [step(mesh, *case) for case in make(dtype)] for make in MAKERS for dtype in DTYPES}
    batches = {dtype: [micro_batches(mesh, *case, 3) for case in all_kinds(dtype, 2, 3, 8, 33)] for dtype in DTYPES}
    return results | {"Megatron's": [plain_step(mesh, *case) for case in plain(torch.float32)[1:]], "batches": batches}


@pytest.fixture(scope="module")
def ranks():
    """Degree → what each of its ranks computed."""
    return {size: on_ranks(size, SHARDS, everything) for size in SIZES}


@pytest.fixture(scope="module")
def results(ranks):
    """(make, dtype) → for each degree, for each case, output, dx and weight gradient of the whole."""
    return {
        (make, dtype): [
            [joined(case, [rank[make, dtype][n] for rank in ranks[size]]) for n, case in enumerate(make(dtype))]
            for size in SIZES
        ]
        for make in MAKERS
        for dtype in DTYPES
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_one_result_for_all_degrees(results, make, dtype):
    first, *others = results[make, dtype]
    assert [unequal(a, b) for other in others for a, b in zip(first, other, strict=True)] == [[]] * 6
    assert make is not plain or unequal(first[0], first[1]) == []  # sequence parallelism changes nothing
    for y, dx, dw in first:
        if make is special:
            assert dw.isnan().all()
            assert 0 < y.isnan().sum() < y.numel() / 2
            assert dx.isnan().any()
        assert make is not zeros or not dw.signbit().any()


def test_the_plain_weight_gradient_depends_on_the_degree(ranks):
    for n, case in enumerate(plain(torch.float32)[1:]):
        single, four = (joined(case, [rank["Megatron's"][n] for rank in ranks[size]]) for size in (1, 4))
        assert unequal(single, four) == ["weight gradient"]
        torch.testing.assert_close(single[2], four[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(results, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    for actual, (_, *operands) in zip(results[plain, dtype][-1], plain(dtype), strict=True):
        x, weight, dy = (operand.double().requires_grad_() for operand in operands)
        y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)
        for a, b in zip(actual, (y, *torch.autograd.grad(y, (x, weight), dy)), strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def micro_batches(mesh, shards_of, x, weight, dy, batches) -> tuple[Tensor, Tensor, bool, Tensor]:
    """main_grad after some micro-batches, what autograd got, the flag, and the sum of the fp32 gradients."""
    weight = weight.clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    added = torch.zeros_like(weight.main_grad)
    fired = []
    weight.register_hook(lambda gradient: fired.append(gradient.dtype))
    for x_batch, dy_batch in zip(x.chunk(batches, 1), dy.chunk(batches, 1), strict=True):
        rms_norm(mine(x_batch, mesh, shards_of), weight, EPS, mesh, shards_of).backward(mine(dy_batch, mesh, shards_of))
        added += step(mesh, shards_of, x_batch, weight.detach().float(), dy_batch)[2]
    assert fired == [weight.dtype] * batches
    return weight.main_grad, weight.grad, weight.grad_added_to_main_grad, added


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_micro_batches_are_added_in_main_grad(ranks, dtype):
    totals = []
    for size in SIZES:
        of_size = [rank["batches"][dtype] for rank in ranks[size]]
        for main_grad, grad, flag, added in (case for rank in of_size for case in rank):
            assert same_bits(main_grad, added)
            assert flag
            assert grad.dtype == dtype
        of_all, *divided = ([main_grad for main_grad, *_ in case] for case in zip(*of_size, strict=True))
        totals.append([of_all[0], *(torch.stack(case).sum(0) for case in divided)])
    for others in totals[1:]:
        assert all(same_bits(a, b) for a, b in zip(totals[0], others, strict=True))


@pytest.mark.parametrize("shards_of", NormShards, ids=lambda s: s.name)
def test_shards_that_do_not_fit_are_named(shards_of):
    x, weight, _ = inputs(torch.float32, (1, 1, 12, 4) if shards_of is HEADS else (12, 1, 4))
    what = "heads" if shards_of is HEADS else "positions"
    with pytest.raises(ValueError, match=f"8 virtual shards do not divide the norm's 12 {what}"):
        rms_norm(x, weight.requires_grad_(), EPS, VirtualMesh(8, 1, 0), shards_of)
    with torch.no_grad():  # no weight gradient, no shards
        rms_norm(x, weight, EPS, VirtualMesh(8, 1, 0), shards_of)


@given(n=st.integers(1, 50))
def test_folding_adds_each_value_once(n):
    values = torch.tensor([[float(i), 100.0 * i] for i in range(n)])
    assert folding_sum(values, 0).tolist() == [n * (n - 1) / 2, 100.0 * n * (n - 1) / 2]


def test_a_norm_of_keys_keeps_keys_alone():
    """They are a slice of what holds queries and values too. The bits are those of keys in memory of their own."""
    whole, weight, dy = inputs(torch.bfloat16, (6, 1, 4, 8))
    keys = whole.requires_grad_()[:, :, 1:3]
    results = keys, keys.detach().clone().requires_grad_()
    saved, ys = [], []
    for x in results:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            ys.append(rms_norm(x, weight, EPS, VirtualMesh(2, 1, 0), HEADS))
        saved.append(max(t.untyped_storage().nbytes() for t in kept))
        ys[-1].backward(dy[:, :, :2])
    assert saved == [keys.numel() * 2] * 2
    assert same_bits(*ys)
    assert same_bits(whole.grad[:, :, 1:3].contiguous(), results[1].grad)
