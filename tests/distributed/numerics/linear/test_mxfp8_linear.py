"""Linear layers in MXFP8: one result for every tensor-parallel degree, that of bf16 layers on rounded operands."""

import pytest
import torch

from tests.distributed.ranks import joined, on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products import mxfp8
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.experts import grouped_linear
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats import plain
from tp_invariant_recipes.numerics.layers.formats.mxfp8 import Mxfp8
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, DEGREES = 4, (1, 2, 4)
S, K, N = 64, 64, 4 * 32  # a rank of four has half a block of tokens
LAYERS = Mxfp8(plain.LIBRARY, E5M2)
EXPERTS = Mxfp8(plain.LIBRARY, E4M3)


def _tensors(segments=1):
    """Of many magnitudes: a scale, a power of two, changes only what is 2^15 below the largest of its block."""
    generator = torch.Generator().manual_seed(3)

    sizes = ((S, K), (segments * N, K), (S, segments * N))
    x, weight, dy = (_wide(*size, generator) for size in sizes)
    return x[:, None], weight, dy[:, None]


def _wide(rows, columns, generator):
    grow = torch.exp2(torch.randint(-9, 9, (rows, columns), generator=generator))
    return (torch.randn(rows, columns, generator=generator) * grow).bfloat16()


def _column(mesh, segments, sequence_parallel):
    x, weight, dy = _tensors(segments)
    local = sliced(weight, 0, mesh, segments).requires_grad_()
    local.main_grad = torch.ones(local.shape)
    inputs = (x.chunk(mesh.size)[mesh.rank] if sequence_parallel else x).clone().requires_grad_()
    y = linear.column_parallel(inputs, local, mesh, segments, sequence_parallel, LAYERS)
    y.backward(sliced(dy, 2, mesh, segments))
    return y.detach(), inputs.grad, local.main_grad


def _row(mesh, sequence_parallel):
    dy, weight, x = _tensors()
    local = sliced(weight.t().contiguous(), 1, mesh).requires_grad_()
    local.main_grad = torch.ones(local.shape)
    inputs = sliced(x, 2, mesh).requires_grad_()
    y = linear.row_parallel(inputs, local, mesh, sequence_parallel, LAYERS)
    y.backward(dy.chunk(mesh.size)[mesh.rank] if sequence_parallel else dy)
    return y.detach(), inputs.grad, local.main_grad


CASES = [(segments, sp) for segments in (1, 2) for sp in (False, True)]


def _everything(mesh):
    result = {case: _column(mesh, *case) for case in CASES} | {sp: _row(mesh, sp) for sp in (False, True)}
    of_rank, start = mxfp8.along_columns, plain.start_all_gather
    if mesh.size == 4:  # the control: a rank rounds its tokens before they are gathered
        alone = lambda x: mxfp8.sides(x, E4M3, rows=False, groups=Groups((len(x),), torch.tensor([len(x)])))[1]  # noqa: E731
        plain.start_all_gather = lambda x, mesh: start(alone(x), mesh)
        mxfp8.along_columns = lambda x, dtype: x if len(x) == S else of_rank(x, dtype)  # the weight has fewer rows
        result["rounded by rank"] = _column(mesh, 1, True)
        mxfp8.along_columns, plain.start_all_gather = of_rank, start
    return result


@pytest.fixture(scope="module")
def results():
    """Degree -> what each of its ranks computed."""
    return {t: on_ranks(t, SHARDS, _everything) for t in DEGREES}


def _column_whole(ranks, segments, sequence_parallel):
    ys, dxs, dws = zip(*ranks, strict=True)
    return joined(ys, 2, segments), torch.cat(dxs) if sequence_parallel else dxs[0], joined(dws, 0, segments)


def _row_whole(ranks, sequence_parallel):
    ys, dxs, dws = zip(*ranks, strict=True)
    return torch.cat(ys) if sequence_parallel else ys[0], torch.cat(dxs, 2), torch.cat(dws, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_column_parallel_has_one_result(results, case):
    first, *others = (_column_whole([r[case] for r in results[t]], *case) for t in DEGREES)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("sp", (False, True))
def test_row_parallel_has_one_result(results, sp):
    first, *others = (_row_whole([r[sp] for r in results[t]], sp) for t in DEGREES)
    assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_tokens_rounded_by_rank_are_another_result(results):
    y, dx, dw = _column_whole([r["rounded by rank"] for r in results[4]], 1, True)
    expected = _column_whole([r[1, True] for r in results[4]], 1, True)
    assert same_bits(y, expected[0])
    assert same_bits(dx, expected[1])
    assert not same_bits(dw, expected[2])


def _plain(form, weight, x, dy, which):
    """An output or a gradient of a bf16 layer on these operands."""
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    y = form(x, weight)
    y.backward(dy)
    return (y.detach(), x.grad, weight.main_grad)[which]


@pytest.mark.parametrize("column", (True, False))
def test_operands_are_rounded_along_what_is_summed(results, column):
    """And left as they are, or rounded along the other dimension, they give other bits."""
    mesh = VirtualMesh(SHARDS, 1, 0)
    if column:
        x, weight, dy = _tensors()
        result = results[1][0][1, False]
    else:
        dy, weight, x = _tensors()
        weight, result = weight.t().contiguous(), results[1][0][False]

    def form(x, weight):
        if column:
            return linear.column_parallel(x, weight, mesh, 1, False)
        return linear.row_parallel(x, weight, mesh, False)

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
    x, dy = (_wide(75, 64, generator) for _ in range(2))
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
        return linear.column_parallel(x[:, None], weight, VirtualMesh(SHARDS, 1, 0), 1, sequence_parallel, LAYERS)
    if form == "row":
        return linear.row_parallel(x[:, None], weight, VirtualMesh(SHARDS, 1, 0), sequence_parallel, LAYERS)
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
    x, weight, _ = _tensors()
    with pytest.raises(NotImplementedError, match="2 sequences at once"):
        linear.column_parallel(torch.cat((x, x), 1), weight, VirtualMesh(SHARDS, 1, 0), 1, False, LAYERS)
