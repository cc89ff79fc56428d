"""Linear layers in FP8: without any of the ingredients another result (test_linear.py has that of all degrees)."""

from types import SimpleNamespace

import pytest
import torch

from tests.definitions.fp8_sum import fp8_product
from tests.distributed.numerics.linear.linear_runs import (
    ALONE,
    FORMATS,
    SHARDS,
    K,
    Layer,
    N,
    run,
    tensors,
    unequal,
    whole,
)
from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products import quantize as definition
from tp_invariant_recipes.kernels.products.quantize import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.formats import fp8 as fp8_format
from tp_invariant_recipes.numerics.layers.formats import fp8 as fp8_weights
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.megatron.data_parallel import zeroing_contexts
from tp_invariant_recipes.numerics.products import fp8, quantize
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

S = FORMATS["fp8"].tokens
ROW, COLUMN = Layer(False, sequence_parallel=True), Layer(True, sequence_parallel=True)


def _scales_of_ranks(mesh):
    """With scales of all ranks, and of this rank alone: of a row-parallel input, of a column-parallel weight."""
    results = [run(mesh, "fp8", ROW), run(mesh, "fp8", ROW, Fp8(False, E5M2, None)), run(mesh, "fp8", COLUMN)]
    quantized = fp8_weights.quantized
    fp8_weights.quantized = lambda weight, blockwise, group: quantized(weight, blockwise, None)
    return [*results, run(mesh, "fp8", COLUMN)]


def test_a_scale_of_a_rank_is_another_result():
    run(ALONE, "fp8", ROW)  # compiled here, once, and not in every fork
    *rows, column, other = zip(*on_ranks(2, SHARDS, _scales_of_ranks), strict=True)
    for layer, pair in ((ROW, rows), (COLUMN, (column, other))):
        assert {"output", "input gradient"} <= {*unequal(*(whole(ranks, layer) for ranks in pair))}


def _whole(mesh=ALONE, scaling=None):
    return run(mesh, "fp8", Layer(False), scaling)


def test_sums_that_restart_elsewhere_are_another_result():
    """Promotion moved: one product over all of k in place of one for each shard. bf16 would hide most of it."""
    x, weight, *_ = tensors(FORMATS["fp8"], ROW)
    a, b = (quantize.of_tensor(item, E4M3, None) for item in (x.flatten(0, 1), weight))
    by_shard, at_once = (tree_sum(fp8.nodes(a, b, VirtualMesh(v, 1, 0), (N,))) for v in (SHARDS, 1))
    assert not same_bits(by_shard, at_once)
    assert (by_shard - at_once).norm() < 1e-4 * at_once.norm()  # not another sum


@pytest.mark.parametrize("promoted", (64, 10**6), ids=("earlier", "never, as fast accumulation"))
def test_accumulators_that_are_promoted_elsewhere_are_another_result(monkeypatch, promoted):
    mesh = VirtualMesh(1, 1, 0)  # a sum of 512 in the forward pass, of 128 in the gradients
    expected = _whole(mesh)

    def other(a, b, out, add):
        total = torch.from_numpy(fp8_product(a, b, promoted=promoted))
        out.add_(total) if add else out.copy_(total)

    monkeypatch.setattr(fp8, "on_cpu", other)
    result = _whole(mesh)
    assert not same_bits(expected[0], result[0])
    assert same_bits(expected[2], result[2]) is (promoted > S)


def test_gradients_have_the_type_of_the_recipe():
    assert not same_bits(_whole()[1], _whole(scaling=Fp8(False, E4M3))[1])


def test_two_sequences_at_once_would_share_a_scale():
    x, weight, *_ = tensors(FORMATS["fp8"], COLUMN)
    both = torch.cat((x, x * 16), 1)
    with pytest.raises(NotImplementedError, match="2 sequences at once"):
        linear.column_parallel(both, weight, ALONE, 1, False, Fp8(False, E5M2))


@pytest.mark.parametrize("blockwise", (False, True), ids=("tensorwise", "blockwise"))
def test_a_scale_of_a_micro_batch_is_another_result(monkeypatch, blockwise):
    """By blocks the outputs are those of a sequence alone: a token shares its scales with no other."""
    monkeypatch.setattr(fp8_format, "require_single_sequence", lambda x: None)
    x, weight, *_ = tensors(FORMATS["fp8"], COLUMN)

    def first(x):
        y = linear.column_parallel(x, weight, ALONE, 1, False, Fp8(blockwise, E5M2))
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
    x, weight, _, dy = tensors(FORMATS["fp8"], COLUMN)
    weight.requires_grad_()
    for _ in range(3):
        y = linear.column_parallel(x, weight, ALONE, 1, False, Fp8(False, E5M2))
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
