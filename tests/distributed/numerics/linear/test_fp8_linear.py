"""Linear layers in FP8: one result for every tensor-parallel degree, and another one without any of the ingredients."""

from types import SimpleNamespace

import pytest
import torch

from tests.definitions.fp8_sum import fp8_product
from tests.distributed.ranks import joined, on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products import quantize as definition
from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.formats import fp8 as fp8_format
from tp_invariant_recipes.numerics.layers.formats import fp8_weights
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.megatron.data_parallel import zeroing_contexts
from tp_invariant_recipes.numerics.products import fp8, quantize
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

SHARDS = 4
DEGREES = (1, 2, 4)
S, K, N = 128, 128, 4 * 128


def _tensors(segments=1):
    """Shards of unlike magnitudes: every rank alone would choose another scale."""
    generator = torch.Generator().manual_seed(3)
    grow = torch.exp2(torch.arange(SHARDS).repeat_interleave(N // SHARDS).float()).repeat(segments)
    x = torch.randn(S, 1, K, generator=generator) * torch.exp2(torch.arange(S) // 32)[:, None, None]
    weight = torch.randn(segments * N, K, generator=generator) * grow[:, None]
    dy = torch.randn(S, 1, segments * N, generator=generator) * grow
    return x.bfloat16(), weight.bfloat16(), dy.bfloat16()


def _column(mesh, scaling, segments, sequence_parallel):
    x, weight, dy = _tensors(segments)
    local = sliced(weight, 0, mesh, segments).requires_grad_()
    local.main_grad = torch.ones(local.shape)
    inputs = (x.chunk(mesh.size)[mesh.rank] if sequence_parallel else x).clone().requires_grad_()
    y = linear.column_parallel(inputs, local, mesh, segments, sequence_parallel, scaling)
    y.backward(sliced(dy, 2, mesh, segments))
    return y.detach(), inputs.grad, local.main_grad


def _row(mesh, scaling, sequence_parallel):
    dy, weight, x = _tensors()
    local = sliced(weight.t().contiguous(), 1, mesh).requires_grad_()
    local.main_grad = torch.ones(local.shape)
    inputs = sliced(x, 2, mesh).requires_grad_()
    y = linear.row_parallel(inputs, local, mesh, sequence_parallel, scaling)
    y.backward(dy.chunk(mesh.size)[mesh.rank] if sequence_parallel else dy)
    return y.detach(), inputs.grad, local.main_grad


CASES = [(blockwise, segments, sp) for blockwise in (False, True) for segments in (1, 2) for sp in (False, True)]
ROWS = [(blockwise, sp) for blockwise in (False, True) for sp in (False, True)]


def _everything(mesh):
    scalings = [Fp8(blockwise, E5M2, mesh.group) for blockwise in (False, True)]
    alone = Fp8(False, E5M2, None)
    results = {
        "column": {case: _column(mesh, scalings[case[0]], *case[1:]) for case in CASES},
        "row": {case: _row(mesh, scalings[case[0]], case[1]) for case in ROWS},
        "scale by rank": _row(mesh, alone, True),
    }
    quantized = fp8_weights.quantized
    fp8_weights.quantized = lambda weight, blockwise, group: quantized(weight, blockwise, None)
    results["weight scale by rank"] = _column(mesh, scalings[0], 1, True)
    fp8_weights.quantized = quantized
    return results


@pytest.fixture(scope="module")
def results():
    """Degree -> what each of its ranks computed."""
    fp8_product_is_compiled()
    return {t: on_ranks(t, SHARDS, _everything) for t in DEGREES}


def fp8_product_is_compiled():
    """Here, once, and not in every fork."""
    _row(VirtualMesh(SHARDS, 1, 0), Fp8(False, E5M2), False)
    _row(VirtualMesh(SHARDS, 1, 0), Fp8(True, E5M2), False)


def _column_whole(ranks, segments, sequence_parallel):
    ys, dxs, dws = zip(*ranks, strict=True)
    dx = torch.cat(dxs) if sequence_parallel else dxs[0]
    assert sequence_parallel or all(same_bits(dx, other) for other in dxs)
    return joined(ys, 2, segments), dx, joined(dws, 0, segments)


def _row_whole(ranks, sequence_parallel):
    ys, dxs, dws = zip(*ranks, strict=True)
    return torch.cat(ys) if sequence_parallel else ys[0], torch.cat(dxs, 2), torch.cat(dws, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_column_parallel_has_one_result(results, case):
    first, *others = (_column_whole([r["column"][case] for r in results[t]], *case[1:]) for t in DEGREES)
    reference = _column_whole([r["column"][(case[0], case[1], True)] for r in results[1]], *case[1:2], True)
    for other in (*others, reference):
        assert all(map(same_bits, first, other))


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_row_parallel_has_one_result(results, case):
    first, *others = (_row_whole([r["row"][case] for r in results[t]], case[1]) for t in DEGREES)
    for other in others:
        assert all(map(same_bits, first, other))


@pytest.mark.parametrize("t", DEGREES[1:])
def test_a_scale_of_a_rank_is_another_result(results, t):
    for omitted, expected in (
        (
            _row_whole([r["scale by rank"] for r in results[t]], True),
            _row_whole([r["row"][False, True] for r in results[t]], True),
        ),
        (
            _column_whole([r["weight scale by rank"] for r in results[t]], 1, True),
            _column_whole([r["column"][False, 1, True] for r in results[t]], 1, True),
        ),
    ):
        assert not same_bits(omitted[0], expected[0])
        assert not same_bits(omitted[1], expected[1])


def _whole(mesh=None, scaling=None):
    return _row(mesh or VirtualMesh(SHARDS, 1, 0), scaling or Fp8(False, E5M2), False)


def test_sums_that_restart_elsewhere_are_another_result():
    """Promotion moved: one product over all of k in place of one for each shard. bf16 would hide most of it."""
    _, weight, x = _tensors()
    a, b = (quantize.of_tensor(item, E4M3, None) for item in (x.flatten(0, 1), weight.t()))
    shards, whole = (tree_sum(fp8.nodes(a, b, VirtualMesh(v, 1, 0), (N,))) for v in (SHARDS, 1))
    assert not same_bits(shards, whole)
    torch.testing.assert_close(shards, whole, rtol=1e-5, atol=1e-3)  # not another sum


@pytest.mark.parametrize("promoted", (64, 10**6), ids=("earlier", "never, as fast accumulation"))
def test_accumulators_that_are_promoted_elsewhere_are_another_result(monkeypatch, promoted):
    mesh = VirtualMesh(1, 1, 0)  # a sum of 512 in the forward pass, of 128 in the gradients
    expected = _whole(mesh)

    def other(a, b, out, add):
        total = torch.from_numpy(fp8_product(a, b, promoted=promoted))
        out.add_(total) if add else out.copy_(total)

    monkeypatch.setitem(fp8.CHOICES, "cpu", other)
    result = _whole(mesh)
    assert not same_bits(expected[0], result[0])
    assert same_bits(expected[2], result[2]) is (promoted > S)


def test_gradients_have_the_type_of_the_recipe():
    assert not same_bits(_whole()[1], _whole(scaling=Fp8(False, E4M3))[1])


def test_two_sequences_at_once_would_share_a_scale():
    x, weight, _ = _tensors()
    both = torch.cat((x, x * 16), 1)
    with pytest.raises(NotImplementedError, match="2 sequences at once"):
        linear.column_parallel(both, weight, VirtualMesh(SHARDS, 1, 0), 1, False, Fp8(False, E5M2))


@pytest.mark.parametrize("blockwise", (False, True), ids=("tensorwise", "blockwise"))
def test_a_scale_of_a_micro_batch_is_another_result(monkeypatch, blockwise):
    """By blocks the outputs are those of a sequence alone: a token shares its scales with no other."""
    monkeypatch.setattr(fp8_format, "require_single_sequence", lambda x: None)
    x, weight, _ = _tensors()

    def first(x):
        y = linear.column_parallel(x, weight, VirtualMesh(SHARDS, 1, 0), 1, False, Fp8(blockwise, E5M2))
        return y[:, 0]

    louder = x * 1.5  # not by a power of two, which would change exponents alone
    assert same_bits(first(x), first(torch.cat((x, louder), 1))) is blockwise


@pytest.fixture
def made(monkeypatch):
    """The weights that are quantized."""
    result, real = [], quantize.of_tensor_both_ways
    monkeypatch.setattr(quantize, "of_tensor_both_ways", lambda x, *rest: result.append(x.shape) or real(x, *rest))
    return result


def test_a_weight_is_quantized_once_a_step(made):
    weight = torch.randn(N, K).bfloat16().requires_grad_()

    def forward():
        return fp8_weights.quantized(weight, False, None)

    first = forward()
    before = first.rows.data.float()
    with torch.no_grad():
        weight.mul_(-1)  # without a new step: the products of the step are those of the weight as it was
    assert forward() is first
    assert len(made) == 1
    first.of_backward()
    fp8_weights.changed()
    assert torch.equal(forward().rows.data.float(), -before)
    assert torch.equal(forward().columns.data.float(), -before.t())
    with pytest.raises(RuntimeError, match="quantized again before a backward pass"):
        first.of_backward()
    with torch.no_grad():
        weight.mul_(-1)
        assert torch.equal(forward().rows.data.float(), before)  # an evaluation knows no steps


def test_a_step_begins_where_megatron_zeroes_its_gradients(made):
    zero = zeroing_contexts(lambda model: None)
    weight = torch.randn(N, K).bfloat16().requires_grad_()
    for _ in range(2):
        zero(SimpleNamespace(buffers=[], expert_parallel_buffers=[]))
        for _ in range(2):
            fp8_weights.quantized(weight, False, None)
    assert len(made) == 2


def test_layers_quantize_a_weight_once_a_step(made):
    x, weight, dy = _tensors()
    weight.requires_grad_()
    for _ in range(3):
        y = linear.column_parallel(x, weight, VirtualMesh(SHARDS, 1, 0), 1, False, Fp8(False, E5M2))
        y.backward(dy)
    assert made.count(weight.shape) == 1


@pytest.mark.parametrize("blockwise", (False, True))
def test_a_weight_has_one_memory(monkeypatch, blockwise):
    """For steps, evaluations and graphs: a graph's own would come beside it. All hold the numbers of the weight."""
    weight = torch.randn(N, K).bfloat16().requires_grad_()
    places = set()
    for evaluates, captures in ((False, False), (True, False), (False, True), (False, False)):
        monkeypatch.setattr(fp8_weights.cublas, "capturing", lambda weight, captures=captures: captures)
        fp8_weights.changed()
        with torch.no_grad():
            weight.copy_(torch.randn(N, K))
        with torch.set_grad_enabled(not evaluates):
            kept = fp8_weights.quantized(weight, blockwise, None)
        both = kept.rows, kept.columns
        places.add(tuple(x.data_ptr() for item in both for x in (item.data, item.scale)))
        (expected, _), _ = quantize.of_weight(weight.detach(), blockwise, None)
        for first, other in zip(both, (expected, definition.transposed(expected)), strict=True):
            assert torch.equal(first.data.view(torch.uint8), other.data.view(torch.uint8))
            assert torch.equal(first.scale, other.scale)
    assert len(places) == 1


def test_every_replay_of_a_graph_quantizes_and_nothing_else_reads_that(monkeypatch, made):
    weight = torch.randn(N, K).bfloat16().requires_grad_()
    fp8_weights.quantized(weight, False, None)
    monkeypatch.setattr(fp8_weights.cublas, "capturing", lambda weight: True)
    captured = [fp8_weights.quantized(weight, False, None) for _ in range(2)]
    monkeypatch.setattr(fp8_weights.cublas, "capturing", lambda weight: False)
    assert fp8_weights.quantized(weight, False, None) not in captured
    assert len(made) == 4
