"""Linear layers in MXFP8 have the result of bf16 layers on rounded operands; test_linear.py has all degrees."""

import pytest
import torch

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
from tp_invariant_recipes.kernels.products import mxfp8
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantize import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.experts import grouped_linear
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats import plain
from tp_invariant_recipes.numerics.layers.formats.mxfp8 import Mxfp8
from tp_invariant_recipes.numerics.layers.linear import linear

S = FORMATS["mxfp8"].tokens
LAYERS = Mxfp8(plain.LIBRARY, E5M2)
EXPERTS = Mxfp8(plain.LIBRARY, E4M3)
COLUMN = Layer(True, sequence_parallel=True)


def _rounded_by_rank(mesh):
    """What a rank computes; and where it rounds its tokens before they are gathered."""
    result = run(mesh, "mxfp8", COLUMN)
    of_rank, start = mxfp8.along_columns, plain.start_all_gather
    alone = lambda x: mxfp8.sides(x, E4M3, rows=False, groups=Groups((len(x),), torch.tensor([len(x)])))[1]  # noqa: E731
    plain.start_all_gather = lambda x, mesh: start(alone(x), mesh)
    mxfp8.along_columns = lambda x, dtype: x if len(x) == S else of_rank(x, dtype)  # the weight has more rows
    return result, run(mesh, "mxfp8", COLUMN)


def test_tokens_rounded_by_rank_are_another_result():
    expected, other = (whole(ranks, COLUMN) for ranks in zip(*on_ranks(4, SHARDS, _rounded_by_rank), strict=True))
    assert unequal(expected, other) == ["weight gradient"]


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
    assert same_bits(_plain(form, w, xr, dy, 0), result[0])
    assert same_bits(_plain(form, wt, x, g, 1), result[1])
    assert same_bits(_plain(form, weight, xt, gt, 2), result[2])
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
    for which, (rows, columns, remaining) in enumerate(((0, 0, xr), (1, 1, g))):
        across = experts.of_batches(batches, [pair[rows] for pair in rounded])
        out = torch.empty(75, 64, dtype=torch.bfloat16)
        plain.PLAIN.multiply_groups(remaining, across, out, groups, forward=not columns)
        assert same_bits(out, (y.detach(), inputs.grad)[which])

    def add(outs):
        plain.PLAIN.add_gradients(gt, (xt,), outs, batches)

    expected = experts.weight_gradients(add, [w.detach() for w in weights], batches, x.device)
    assert all(same_bits(weight.grad, item) for weight, item in zip(weights, expected, strict=True))


def _linear(form, x, weight, sequence_parallel=False):
    if form == "column":
        return linear.column_parallel(x[:, None], weight, ALONE, 1, sequence_parallel, LAYERS)
    if form == "row":
        return linear.row_parallel(x[:, None], weight, ALONE, sequence_parallel, LAYERS)
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
    made, real, kept = [], mxfp8._by_numba, {}
    monkeypatch.setattr(
        mxfp8, "_by_numba", lambda x, out, dtype, *sides: made.append(sides[:2]) or real(x, out, dtype, *sides)
    )
    x, weight = torch.randn(S, K).bfloat16(), torch.randn(N, K).bfloat16()
    x.requires_grad, weight.requires_grad = graded

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = _linear(form, x, weight)
    if any(graded):
        y.sum().backward()
    kept.pop(weight.untyped_storage().data_ptr(), None)
    assert (sum(item.untyped_storage().nbytes() for item in kept.values()), made) == (read[0] * S * K, read[1])
    made.clear()
    with torch.no_grad():  # as the first forward pass of a layer that is computed again
        assert same_bits(_linear(form, x, weight), y.detach())
    assert made == [ROWS, ROWS]


def test_weights_are_rounded_as_they_are_now():
    """Nothing of a weight is kept beside it, so a step's update reaches the next forward pass without a word."""
    x, weight = torch.randn(S, K).bfloat16(), torch.randn(N, K).bfloat16().requires_grad_()
    before = _linear("column", x, weight).detach()
    with torch.no_grad():
        weight.mul_(-1)
    assert same_bits(_linear("column", x, weight).detach(), -before)
    assert vars(weight) == {}


def test_two_sequences_at_once_would_share_scales():
    x, weight, *_ = tensors(FORMATS["mxfp8"], COLUMN)
    with pytest.raises(NotImplementedError, match="2 sequences at once"):
        linear.column_parallel(torch.cat((x, x), 1), weight, ALONE, 1, False, LAYERS)
