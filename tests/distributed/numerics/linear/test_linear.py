"""Column- and row-parallel layers and their biases, in every format: one result for every tensor-parallel degree."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.numerics.linear.linear_runs import (
    ALONE,
    DEGREES,
    FORMATS,
    SHARDS,
    Layer,
    run,
    tensors,
    unequal,
    whole,
)
from tests.distributed.ranks import on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.kernels.products.fixed_tile_product import fixed_tile_product
from tp_invariant_recipes.numerics.layers.formats.plain import GATHERED
from tp_invariant_recipes.numerics.layers.linear import linear

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
        whole([rank[0][name, case] for rank in results[degree]], case)
        for degree in DEGREES
        for case in (layer, layer._replace(sequence_parallel=True))
    ]
    assert [unequal(wholes[0], other) for other in wholes[1:]] == [[]] * (len(wholes) - 1)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("column", (True, False))
def test_they_agree_with_an_fp64_reference(results, name, column):
    layer = Layer(column, main_grad=False)
    x, weight, bias, dy = (tensor.double() for tensor in tensors(FORMATS[name], layer))
    actual = whole([rank[0][name, layer] for rank in results[2]], layer)
    tolerance = 1e-5 if FORMATS[name].dtype == torch.float32 else 1e-2
    for result, exact in zip(
        actual, (x @ weight.t() + bias, dy @ weight, dy[:, 0].t() @ x[:, 0], dy.sum((0, 1))), strict=True
    ):
        assert (result.double() - exact).norm() < tolerance * exact.norm()


@pytest.mark.parametrize("name", PLAIN[2:])
def test_the_published_scheme_is_one_product_of_whole_tensors(results, name):
    """And no tree: the control."""
    for column in (True, False):
        layer = Layer(column, main_grad=False)
        x, weight, bias, dy = tensors(FORMATS[name], layer)
        summed, operands = ("input gradient", (dy, weight)) if column else ("output", (x, weight.t()))
        product = fixed_tile_product(operands[0][:, 0], operands[1], torch.empty_like(x if column else dy)[:, 0])
        expected = product if column else product + bias
        gathered, tree = (
            whole([rank[0][form, layer] for rank in results[4]], layer)
            for form in (name, name.replace("gather", "tree"))
        )
        assert same_bits(gathered[int(column)][:, 0], expected)
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
