# SPDX-License-Identifier: Apache-2.0
"""Linear layers in FP8 and MXFP8: without any of the ingredients another result; test_linear.py has all degrees."""

from types import SimpleNamespace

import pytest
import torch

from tests.definitions.fp8_sum import fp8_product
from tests.distributed.numerics.linear_runs import ALONE, FORMATS, SHARDS, K, Layer, N, run, tensors
from tests.distributed.ranks import on_ranks, together, unequal
from tests.operands import same_bits
from tp_invariant_recipes.kernels.gemm import mxfp8
from tp_invariant_recipes.kernels.gemm import quantize as definition
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.numerics.gemm import fp8, quantize
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.experts import grouped_linear
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats import fp8 as fp8_format
from tp_invariant_recipes.numerics.layers.formats import plain
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8, Mxfp8
from tp_invariant_recipes.numerics.megatron.data_parallel import zeroing_contexts
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

S, S32 = FORMATS["fp8"].tokens, FORMATS["mxfp8"].tokens
ROW, COLUMN = Layer(False, sequence_parallel=True), Layer(True, sequence_parallel=True)
LAYERS, EXPERTS = Mxfp8(plain.LIBRARY, E5M2), Mxfp8(plain.LIBRARY, E4M3)


def _planted(mesh):
    """With what an ingredient computes, and without: scales and roundings of this rank alone."""
    results = [run(mesh, "fp8", ROW), run(mesh, "fp8", ROW, Fp8(False, E5M2, None)), run(mesh, "fp8", COLUMN)]
    quantized = fp8_format.quantized
    fp8_format.quantized = lambda weight, blockwise, group: quantized(weight, blockwise, None)
    results += [run(mesh, "fp8", COLUMN), run(mesh, "mxfp8", COLUMN)]
    of_rank = mxfp8.along_columns
    alone = lambda x: mxfp8.sides(x, E4M3, rows=False, groups=Groups((len(x),), torch.tensor([len(x)])))[1]  # noqa: E731
    Mxfp8.start_gathering = lambda _, kept, mesh: plain.start_all_gather(alone(kept[0]), mesh)
    mxfp8.along_columns = lambda x, dtype: x if len(x) == S32 else of_rank(x, dtype)  # the weight has more rows
    return [*results, run(mesh, "mxfp8", COLUMN)]


def test_what_a_rank_scales_and_rounds_alone_is_another_result():
    run(ALONE, "fp8", ROW)  # compiled here, once, and not in every fork
    wholes = [together(ranks) for ranks in zip(*on_ranks(4, SHARDS, _planted), strict=True)]
    of_rows, of_weights, of_tokens = (unequal(*wholes[n : n + 2]) for n in (0, 2, 4))
    assert {"output", "input gradient"} <= {*of_rows} & {*of_weights}
    assert of_tokens == ["weight gradient"]


# --- FP8 ---


def _alone(mesh=ALONE, scaling=None):
    return together([run(mesh, "fp8", Layer(False), scaling)])


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
    expected = _alone(mesh)

    def other(a, b, out, add):
        total = torch.from_numpy(fp8_product(a, b, promoted=promoted))
        out.add_(total) if add else out.copy_(total)

    monkeypatch.setattr(fp8, "on_cpu", other)
    different = unequal(expected, _alone(mesh))
    assert "output" in different
    assert ("weight gradient" in different) is (promoted <= S)


def test_gradients_have_the_type_of_the_recipe():
    assert "input gradient" in unequal(_alone(), _alone(scaling=Fp8(False, E4M3)))


@pytest.mark.parametrize("form", (Fp8(False, E5M2), LAYERS), ids=("fp8", "mxfp8"))
def test_two_sequences_at_once_would_share_a_scale(form):
    x, weight, *_ = tensors(FORMATS["fp8"], COLUMN)
    with pytest.raises(NotImplementedError, match="2 sequences at once"):
        linear.column_parallel(torch.cat((x, x * 16), 1), weight, ALONE, 1, False, form)


@pytest.mark.parametrize("blockwise", (False, True), ids=("tensorwise", "blockwise"))
def test_a_scale_of_a_micro_batch_is_another_result(monkeypatch, blockwise):
    """By blocks the outputs are those of a sequence alone: a token shares its scales with no other."""
    monkeypatch.setattr(fp8_format, "require_single_sequence", lambda x: None)
    x, weight, *_ = tensors(FORMATS["fp8"], COLUMN)

    def first(x):
        return linear.column_parallel(x, weight, ALONE, 1, False, Fp8(blockwise, E5M2))[:, 0]

    louder = x * 1.5  # not by a power of two, which would change exponents alone
    assert same_bits(first(x), first(torch.cat((x, louder), 1))) is blockwise


@pytest.fixture
def made(monkeypatch):
    """The weights that are quantized."""
    result, real = [], quantize.of_tensor_both_ways
    monkeypatch.setattr(quantize, "of_tensor_both_ways", lambda x, *rest: result.append(x.shape) or real(x, *rest))
    return result


def _weight():
    return torch.randn(N, K).bfloat16().requires_grad_()


def test_a_weight_is_quantized_once_a_step(made):
    weight = _weight()

    def forward():
        return fp8_format.quantized(weight, False, None)

    first = forward()
    before = first.rows.data.float()
    with torch.no_grad():
        weight.mul_(-1)  # without a new step: the products of the step are those of the weight as it was
    assert forward() is first
    assert len(made) == 1
    first.of_backward()
    fp8_format.changed()
    assert torch.equal(forward().rows.data.float(), -before)
    assert torch.equal(forward().columns.data.float(), -before.t())
    with pytest.raises(RuntimeError, match="quantized again before a backward pass"):
        first.of_backward()
    with torch.no_grad():
        weight.mul_(-1)
        assert torch.equal(forward().rows.data.float(), before)  # an evaluation knows no steps


def test_a_step_begins_where_megatron_zeroes_its_gradients(made):
    """And all layers of a step share what is quantized."""
    zero = zeroing_contexts(lambda model: None)
    x, weight, _, dy = tensors(FORMATS["fp8"], COLUMN)
    weight.requires_grad_()
    for _ in range(2):
        zero(SimpleNamespace(buffers=[], expert_parallel_buffers=[]))
        for _ in range(2):
            linear.column_parallel(x, weight, ALONE, 1, False, Fp8(False, E5M2)).backward(dy)
    assert made.count(weight.shape) == 2


@pytest.mark.parametrize("blockwise", (False, True))
def test_a_weight_has_one_memory(monkeypatch, blockwise):
    """For steps, evaluations and graphs: a graph's own would come beside it. All hold the numbers of the weight."""
    weight, memory = _weight(), set()
    for evaluates, captures in ((False, False), (True, False), (False, True), (False, False)):
        monkeypatch.setattr(fp8_format.cublas, "capturing", lambda weight, captures=captures: captures)
        fp8_format.changed()
        with torch.no_grad():
            weight.copy_(torch.randn(N, K))
        with torch.set_grad_enabled(not evaluates):
            kept = fp8_format.quantized(weight, blockwise, None)
        both = kept.rows, kept.columns
        memory.add(tuple(x.data_ptr() for item in both for x in (item.data, item.scale)))
        (expected, _), _ = quantize.of_weight(weight.detach(), blockwise, None)
        for first, other in zip(both, (expected, definition.transposed(expected)), strict=True):
            assert torch.equal(first.data.view(torch.uint8), other.data.view(torch.uint8))
            assert torch.equal(first.scale, other.scale)
    assert len(memory) == 1


def test_every_replay_of_a_graph_quantizes_and_nothing_else_reads_that(monkeypatch, made):
    weight = _weight()
    fp8_format.quantized(weight, False, None)
    monkeypatch.setattr(fp8_format.cublas, "capturing", lambda weight: True)
    captured = [fp8_format.quantized(weight, False, None) for _ in range(2)]
    monkeypatch.setattr(fp8_format.cublas, "capturing", lambda weight: False)
    assert fp8_format.quantized(weight, False, None) not in captured
    assert len(made) == 4


# --- MXFP8: the result of bf16 layers on rounded operands ---


def _plain(form, weight, x, dy, which):
    """An output or a gradient of a bf16 layer on these operands."""
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    y = form(x, weight)
    y.backward(dy)
    return (y.detach(), x.grad, weight.main_grad)[which]


@pytest.mark.parametrize("column", (True, False))
def test_operands_are_rounded_along_what_is_summed(column):
    """And left as they are, or rounded along the other dimension, they give other bits."""
    x, weight, _, dy = tensors(FORMATS["mxfp8"], Layer(column))

    def form(x, weight, *operands):
        if column:
            return linear.column_parallel(x, weight, ALONE, 1, False, *operands)
        return linear.row_parallel(x, weight, ALONE, False, *operands)

    result = [_plain(lambda x, weight: form(x, weight, LAYERS), weight, x, dy, which) for which in range(3)]
    (w, wt), (xr, xt), (g, gt) = (
        [side.view_as(item) for side in mxfp8.sides(item.flatten(0, -2), kind)]
        for item, kind in ((weight, E4M3), (x, E4M3), (dy, E5M2))
    )
    for which, operands in enumerate(((w, xr, dy), (wt, x, g), (weight, xt, gt))):
        assert same_bits(_plain(form, *operands, which), result[which])
    for which, operands in enumerate(((wt, xt, dy), (w, x, gt), (weight, xr, g))):
        assert not same_bits(_plain(form, *operands, which), result[which])
        assert not same_bits(_plain(form, weight, x, dy, which), result[which])


def test_experts_are_rounded_as_their_batches():
    sizes = (40, 0, 3, 32)  # two experts of two sources
    groups = Groups(sizes, torch.tensor(sizes))
    batches = Batches(groups, 0, 2)
    generator = torch.Generator().manual_seed(1)
    grow = torch.exp2(torch.randint(-9, 9, (75, 64), generator=generator))
    x, dy = ((torch.randn(75, 64, generator=generator) * grow).bfloat16() for _ in range(2))
    weights = [torch.randn(64, 64, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    inputs = x.clone().requires_grad_()
    y = grouped_linear(inputs, batches, weights, EXPERTS)
    y.backward(dy)
    (xr, xt), (g, gt) = mxfp8.sides(x, E4M3, groups=groups), mxfp8.sides(dy, E4M3, groups=groups)
    rounded = [mxfp8.sides(weight.detach(), E4M3) for weight in weights]
    for backward, (operand, result) in enumerate(((xr, y.detach()), (g, inputs.grad))):
        across = experts.of_batches(batches, [pair[backward] for pair in rounded])
        out = torch.empty(75, 64, dtype=torch.bfloat16)
        plain.PLAIN.multiply_groups(operand, across, out, groups, forward=not backward)
        assert same_bits(out, result)

    def add(outs):
        plain.PLAIN.add_gradients(gt, (xt,), outs, batches)

    expected = experts.weight_gradients(add, [w.detach() for w in weights], batches, x.device)
    assert all(same_bits(weight.grad, item) for weight, item in zip(weights, expected, strict=True))


def _linear(form, x, weight):
    if form == "column":
        return linear.column_parallel(x[:, None], weight, ALONE, 1, False, LAYERS)
    if form == "row":
        return linear.row_parallel(x[:, None], weight, ALONE, False, LAYERS)
    sizes = (len(x),)
    return grouped_linear(x, Batches(Groups(sizes, torch.tensor(sizes)), 0, 1), [weight], EXPERTS)


# Whether input and weight have gradients -> bytes a number of the input that stay for the backward pass; the sides,
# along features and along tokens or rows, that input and weight, then gradient and weight are rounded along.
ROWS, COLUMNS, BOTH = (True, False), (False, True), (True, True)
READ = {
    (True, True): (2, [BOTH, ROWS, BOTH, COLUMNS]),
    (False, True): (2, [BOTH, ROWS, COLUMNS]),  # the first layer's input
    (True, False): (0, [ROWS, ROWS, ROWS, COLUMNS]),  # LoRA's frozen weights
    (False, False): (0, [ROWS, ROWS]),
}


@pytest.mark.parametrize("form", ("column", "row", "experts"))
@pytest.mark.parametrize("graded, read", READ.items(), ids=str)
def test_a_side_that_nobody_reads_is_neither_rounded_nor_kept(monkeypatch, form, graded, read):
    sides, real, kept = [], mxfp8._by_numba, {}
    monkeypatch.setattr(
        mxfp8, "_by_numba", lambda x, out, dtype, *how: sides.append(how[:2]) or real(x, out, dtype, *how)
    )
    x, weight = torch.randn(S32, K).bfloat16(), torch.randn(N, K).bfloat16()
    x.requires_grad, weight.requires_grad = graded

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = _linear(form, x, weight)
    if any(graded):
        y.sum().backward()
    kept.pop(weight.untyped_storage().data_ptr(), None)
    assert (sum(item.untyped_storage().nbytes() for item in kept.values()), sides) == (read[0] * S32 * K, read[1])
    sides.clear()
    with torch.no_grad():  # as the first forward pass of a layer that is computed again
        assert same_bits(_linear(form, x, weight), y.detach())
    assert sides == [ROWS, ROWS]


def test_weights_are_rounded_as_they_are_now():
    """Nothing of a weight is kept beside it, so a step's update reaches the next forward pass without a word."""
    x, weight = torch.randn(S32, K).bfloat16(), _weight()
    before = _linear("column", x, weight).detach()
    with torch.no_grad():
        weight.mul_(-1)
    assert same_bits(_linear("column", x, weight).detach(), -before)
    assert vars(weight) == {}
