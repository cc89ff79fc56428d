# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel layers and their biases, in every format: one result for every tensor-parallel degree.

Also the layer that a norm is part of.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.numerics.linear_runs import ALONE, DEGREES, FORMATS, NAMES, SHARDS, Layer, run, tensors
from tests.distributed.ranks import on_ranks, sliced, together, unequal
from tests.operands import same_bits
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import fixed_tile_gemm
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.formats.plain import GATHERED
from tp_invariant_recipes.numerics.layers.norm import Norm, NormShards, rms_norm

LAYERS = (Layer(True, segments=2), Layer(False))
PLAIN = ("tree", "tree, fp32", "gather", "gather, fp32")
CASES = [(name, layer) for name, layer in itertools.product(FORMATS, LAYERS)]
CASES += [(name, Layer(column, main_grad=False)) for name, column in itertools.product(PLAIN, (True, False))]
ROW = Layer(False, sequence_parallel=True)


def stock_row(mesh, name):
    """A row-parallel output, and a gradient of a bias from slices of the tokens, as libraries add them."""
    x, weight, _, dy = tensors(FORMATS[name], ROW)
    y = sliced(x, 2, mesh) @ sliced(weight, 1, mesh).t()
    db = dy.chunk(mesh.size)[mesh.rank].sum((0, 1))
    if mesh.size > 1:
        dist.all_reduce(y)
        dist.all_reduce(db)
    return y, db


def everything(mesh):
    results = {
        (name, layer): run(mesh, name, layer)
        for name, (column, segments, _, main_grad) in CASES
        for layer in (Layer(column, segments, slices, main_grad) for slices in (False, True))
    }
    return results, {name: stock_row(mesh, name) for name in PLAIN[:2]}


@pytest.fixture(scope="module")
def results():
    """Degree → what each of its ranks computed, all on one set of ranks: a fork costs more than what it computes."""
    for name in ("fp8", "fp8 in blocks"):
        run(ALONE, name, ROW)  # compiled here, once, and not in every fork
    return {degree: on_ranks(degree, SHARDS, everything) for degree in DEGREES}


@pytest.mark.parametrize("name, layer", CASES, ids=str)
def test_one_result_for_all_degrees_and_sequence_parallelism(results, name, layer):
    wholes = [
        together([rank[0][name, case] for rank in results[degree]])
        for degree in DEGREES
        for case in (layer, layer._replace(sequence_parallel=True))
    ]
    assert [unequal(wholes[0], other) for other in wholes[1:]] == [[]] * (len(wholes) - 1)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("column", (True, False))
def test_they_agree_with_an_fp64_reference(results, name, column):
    layer = Layer(column, main_grad=False)
    x, weight, bias, dy = (tensor.double() for tensor in tensors(FORMATS[name], layer))
    actual = together([rank[0][name, layer] for rank in results[2]])
    tolerance = 1e-5 if FORMATS[name].dtype == torch.float32 else 1e-2
    exact = x @ weight.t() + bias, dy @ weight, dy[:, 0].t() @ x[:, 0], dy.sum((0, 1))
    for part, correct in zip(NAMES, exact, strict=True):
        assert (actual[part].double() - correct).norm() < tolerance * correct.norm()


@pytest.mark.parametrize("name", PLAIN[2:])
def test_the_published_scheme_is_one_product_of_whole_tensors(results, name):
    """And no tree: the control."""
    for column in (True, False):
        layer = Layer(column, main_grad=False)
        x, weight, bias, dy = tensors(FORMATS[name], layer)
        summed, operands = ("input gradient", (dy, weight)) if column else ("output", (x, weight.t()))
        gemm = fixed_tile_gemm(operands[0][:, 0], operands[1], torch.empty_like(x if column else dy)[:, 0])
        expected = gemm if column else gemm + bias
        gathered, tree = (
            together([rank[0][form, layer] for rank in results[4]]) for form in (name, name.replace("gather", "tree"))
        )
        assert same_bits(gathered[summed][:, 0], expected)
        assert summed in unequal(gathered, tree)


def test_tokens_that_ranks_do_not_divide_are_refused():
    def uneven(mesh):
        linear.row_parallel(torch.ones(3, 1, 4), torch.ones(4, 4), mesh, True, GATHERED)

    with pytest.raises(RuntimeError, match="2 ranks do not divide 3 tokens"):
        on_ranks(2, 2, uneven)


@pytest.mark.parametrize("name", PLAIN[:2])
def test_stock_has_several(results, name):
    for first, other in zip(results[1][0][1][name], results[4][0][1][name], strict=True):
        assert not same_bits(first, other)


def test_logits_may_be_changed_in_place():
    """As Megatron's own cross entropy does in fp32."""
    x, weight = torch.randn(8, 2, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    y = linear.column_parallel(x, weight, ALONE, 1, False)
    y.mul_(2.0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * weight.detach().sum(0).expand_as(x))


# --- a norm and the product after it as one function of autograd ---

EPS, S, B, K, N = 1e-6, 16, 2, 64, 48
WANTED = ((True, True, True), (True, False, False), (False, True, False), (False, False, True))


def in_single_call(x, gain, weight, mesh, segments, slices, shards_of):
    layer = linear.Column(mesh, segments, slices and mesh.size > 1)
    return linear.norm_column_parallel(x, gain, weight, EPS, Norm(mesh, shards_of), layer)


def separate(x, gain, weight, mesh, segments, slices, shards_of):
    return linear.column_parallel(rms_norm(x, gain, EPS, mesh, shards_of), weight, mesh, segments, slices)


def in_single_segment(x, gain, weight, mesh, segments, slices, shards_of):
    return separate(x, gain, weight, mesh, 1, slices, shards_of)


def step(mesh, form, dtype, slices, in_buffers, wanted):
    """Output and gradients of a rank; two micro-batches where gradients are added in Megatron's buffers."""
    generator = torch.Generator().manual_seed(7)
    x, gain, weight, dy = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((S, B, K), (K,), (2 * N, K), (S, B, 2 * N))
    )
    half = dy[..., :N]  # sums over features that cancel show every order of additions
    dy, weight = torch.cat((half, -half), 2), torch.cat((weight[:N], weight[:N] + weight[N:] / 64))
    x = (x.chunk(mesh.size)[mesh.rank] if slices else x).clone()
    leaves = [x, gain, sliced(weight, 0, mesh, 2).contiguous()]
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    if in_buffers:
        for leaf in leaves[1:]:
            leaf.main_grad = torch.zeros(leaf.shape)
    shards_of = NormShards.SEQUENCE_SLICE if slices else NormShards.SEQUENCE_WHOLE
    for _ in range(1 + in_buffers):
        y = form(*leaves, mesh, 2, slices, shards_of)
        y.backward(sliced(dy, 2, mesh, 2))
    gradients = [leaf.grad for leaf in leaves]
    return [y.detach(), gradients[0], *([leaf.main_grad for leaf in leaves[1:]] if in_buffers else gradients[1:])]


def steps(mesh, *cases):
    return [[step(mesh, form, *case) for form in (in_single_call, separate, in_single_segment)] for case in cases]


def equal(a, b):
    return all(x is y is None or same_bits(x, y) for x, y in zip(a, b, strict=True))


STEPS = [
    (dtype, slices, in_buffers, WANTED[0])
    for dtype in (torch.float32, torch.bfloat16)
    for slices in (False, True)
    for in_buffers in (False, True)
]
STEPS += [(torch.bfloat16, False, False, wanted) for wanted in WANTED[1:]]


@pytest.mark.parametrize("ranks", (1, 2))
def test_one_function_has_the_bits_of_two(ranks):
    """The control: the same with gate and up as one segment, whose sums have another order."""
    for rank in on_ranks(ranks, 8, steps, *STEPS):
        for (first, second, other), (*_, wanted) in zip(rank, STEPS, strict=True):
            assert equal(first, second)
            assert [gradient is not None for gradient in first[1:]] == [*wanted]
            assert not wanted[0] or not equal(second, other)
