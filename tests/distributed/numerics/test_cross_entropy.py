"""Cross entropy: the same bits for every degree, right, and Megatron's beside it, which is not the same."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.kernels import cross_entropy as kernel
from tp_invariant_recipes.numerics.layers.cross_entropy import vocab_parallel_cross_entropy
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SIZES = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16)


def inputs(dtype: torch.dtype, shape: tuple[int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and the loss's gradient."""
    torch.manual_seed(seed)
    return (torch.randn(shape) * 4).to(dtype), torch.randint(shape[2], shape[:2]), torch.randn(shape[:2])


def step(mesh, logits, target, gradient, memory=torch.contiguous_format) -> tuple[Tensor, Tensor]:
    """Loss and dlogits of one rank."""
    logits = logits.chunk(mesh.size, -1)[mesh.rank].clone(memory_format=memory).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, target, mesh)
    loss.backward(gradient)
    assert same_bits(before, logits.detach()), "logits were overwritten"
    return loss.detach(), logits.grad


def plain_step(mesh, logits, target, gradient) -> tuple[Tensor, Tensor]:
    """The same as Megatron does it: exponentials of the whole local vocabulary, then an all-reduce."""
    logits = logits.chunk(mesh.size, -1)[mesh.rank].float()
    highest = logits.amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    logits = logits - highest.unsqueeze(-1)
    hot = torch.arange(logits.shape[-1]) + mesh.rank * logits.shape[-1] == target.unsqueeze(-1)
    picked, total = (logits * hot).sum(-1), logits.exp().sum(-1)
    dist.all_reduce(picked)
    dist.all_reduce(total)
    return total.log() - picked, (logits.exp() / total.unsqueeze(-1) - hot.float()) * gradient.unsqueeze(-1)


def joined(ranks) -> tuple[Tensor, Tensor]:
    """Loss, the same on all ranks, and dlogits put together."""
    loss, dlogits = zip(*ranks, strict=True)
    assert all(same_bits(loss[0], other) for other in loss)
    return loss[0], torch.cat(dlogits, -1)


def assert_same(results) -> None:
    first, *others = results
    for other in others:
        for name, a, b in zip(("loss", "dlogits"), first, other, strict=True):
            assert same_bits(a, b), name


def special(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """NaN and infinities as logits, of the target too, and as gradients."""
    logits, target, gradient = inputs(dtype, (16, 1, 72))
    for row, (value, place) in enumerate((v, p) for v in (math.nan, math.inf, -math.inf) for p in (0, 40, 71)):
        logits[row, 0, place] = value
        target[row] = place if row % 2 else 5
    logits[9] = -math.inf
    logits[10, 0, 3], logits[10, 0, 60] = math.nan, -math.nan
    gradient[11], gradient[12] = math.nan, math.inf
    return logits, target, gradient


def zeros(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros of both signs, and all of the probability on a target."""
    logits = torch.zeros(4, 2, 16, dtype=dtype)
    logits[0, :, ::2] = -0.0
    logits[1] = -0.0
    logits[2, :, 1:] = -math.inf  # all of the probability on the target: loss 0
    logits[3, :, :15] = -math.inf
    return logits, torch.tensor([[0, 1], [14, 15], [0, 0], [15, 15]]), -torch.ones(4, 2)


def outside(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Targets that are not in the vocabulary."""
    logits, target, gradient = inputs(dtype, (4, 1, 32))
    target[0], target[1] = -100, 32
    return logits, target, gradient


def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(dtype, (8, 2, 1016))


def small_losses(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """They show the last bits of the sum."""
    logits, _, gradient = plain(dtype)
    return logits, logits.argmax(-1), gradient


# (operands, dtype, V): all of them on one set of ranks, since a fork costs more than what it computes.
CASES = (
    *((make, dtype, shards) for make in (plain, special) for dtype in DTYPES for shards in (4, 8)),
    *((make, dtype, 8) for make in (zeros, small_losses) for dtype in DTYPES),
    (outside, torch.float32, 8),
)


def every_case(mesh) -> dict[tuple, tuple[Tensor, Tensor]]:
    """And by Megatron's way, and with operands that lie in memory as [b, s, vocab]."""
    meshes = {shards: VirtualMesh(shards, mesh.size, mesh.rank, mesh.group) for shards in (4, 8)}
    results = {case: step(meshes[case[2]], *case[0](case[1])) for case in CASES}
    results |= {(plain_step, dtype): plain_step(mesh, *small_losses(dtype)) for dtype in DTYPES}
    logits, target, gradient = plain(DTYPES[1])
    logits, target = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (logits, target))
    strided = step(meshes[8], logits, target, gradient, torch.preserve_format)
    return results | {"strided": tuple(x.contiguous() for x in strided)}


@pytest.fixture(scope="module")
def results():
    """Case -> the loss and dlogits of the whole, of every degree."""
    ranks = [on_ranks(size, size, every_case) for size in SIZES]
    return {case: [joined([rank[case] for rank in actual]) for actual in ranks] for case in ranks[0][0]}


@pytest.mark.parametrize("shards", (4, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_for_all_degrees(results, dtype, shards):
    assert_same(results[plain, dtype, shards])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_megatrons_way_depends_on_the_degree(results, dtype):
    assert_same(results[small_losses, dtype, 8])
    (loss1, dlogits1), _, (loss4, dlogits4) = results[plain_step, dtype]
    assert not same_bits(loss1, loss4)
    assert not same_bits(dlogits1, dlogits4)
    torch.testing.assert_close(loss1, loss4)
    torch.testing.assert_close(dlogits1, dlogits4)


@pytest.mark.parametrize("width", (1, 31, 64, 97, 1000, 1025))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype, width):
    mesh = VirtualMesh(4, 1, 0)
    logits, target, gradient = inputs(dtype, (40, 1, 4 * width))
    loss, dlogits = step(mesh, logits, target, gradient)
    for n in (*range(1, 10), 16, 17):
        rows = slice(3, 3 + n)
        assert_same([(loss[rows], dlogits[rows]), step(mesh, logits[rows], target[rows], gradient[rows])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(results, dtype):
    logits, target, gradient = plain(dtype)
    wide = logits.double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
    exact.backward(gradient.double().flatten())
    loss, dlogits = results[plain, dtype, 8][-1]
    assert (loss.dtype, dlogits.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double().flatten(), exact.detach(), rtol=1e-6, atol=1e-6)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(dlogits.double(), wide.grad, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("shards", (4, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_the_same_everywhere(results, dtype, shards):
    result = results[special, dtype, shards]
    assert_same(result)
    loss, dlogits = result[0]
    actual, rows = loss[:, 0], torch.arange(16)
    assert rows[actual.isnan()].tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
    assert rows[actual.isposinf()].tolist() == [7]  # the target's logit is -inf
    assert rows[dlogits[:, 0].isnan().all(-1)].tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert dlogits[13:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_both_signs_are_the_same_everywhere(results, dtype):
    result = results[zeros, dtype, 8]
    assert_same(result)
    assert result[0][0][2:].tolist() == [[0.0, 0.0]] * 2


def test_a_target_outside_the_vocabulary_picks_nothing(results):
    result = results[outside, torch.float32, 8]
    assert_same(result)
    logits, _, gradient = outside(torch.float32)
    softmax = logits.softmax(-1) * gradient.unsqueeze(-1)
    torch.testing.assert_close(result[0][1][:2], softmax[:2])


def test_the_order_in_memory_changes_nothing(results):
    assert_same([results[plain, torch.bfloat16, 8][0], *results["strided"]])


def largest(mesh, logits, target, gradient) -> int:
    """The most elements of any fp32 tensor made on the way."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float32:
                self.most = max(self.most, result.numel())
            return result

    with Sizes() as sizes:
        step(mesh, logits, target, gradient)
    return sizes.most


@pytest.mark.parametrize("limit, shards", ((0, 1), (1, 1), (2, 2), (100, 8)))
def test_no_more_is_held_in_fp32_than_fits(monkeypatch, limit, shards):
    """Small shards several at a time, large ones one by one. limit: in shards."""
    tensors = inputs(torch.bfloat16, (4, 2, 512))
    alone = 4 * 2 * 512 // 8
    monkeypatch.setattr(kernel, "NUMBERS_AT_ONCE", limit * alone)
    assert largest(VirtualMesh(8, 1, 0), *tensors) == shards * alone


@pytest.mark.parametrize("rows, width", ((4, 8), (2, 48), (128, 64), (5, 96)))
def test_batched_shards_have_the_bits_that_each_has_alone(monkeypatch, rows, width):
    logits, highest = torch.randn(rows, 8 * width) * 4, torch.randn(rows)
    joined = list(kernel._exponentials(logits, highest, 8))
    assert len(joined) == 1
    monkeypatch.setattr(kernel, "NUMBERS_AT_ONCE", 0)
    assert same_bits(joined[0], torch.cat(list(kernel._exponentials(logits, highest, 8)), -1))


def test_shards_that_are_no_whole_vectors_are_taken_one_by_one():
    """torch computes what fills no vector with other code, which a build of it may round in another way."""
    highest = torch.zeros(7)
    assert [len(list(kernel._exponentials(torch.randn(7, 8 * n), highest, 8))) for n in (32, 33)] == [1, 8]


def test_a_vocabulary_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="8 virtual shards do not divide a vocabulary of 100"):
        vocab_parallel_cross_entropy(torch.zeros(1, 1, 50), torch.zeros(1, 1).long(), VirtualMesh(8, 2, 0))
