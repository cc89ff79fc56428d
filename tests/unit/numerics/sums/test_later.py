# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weight gradients that wait for a gather of the same backward pass, and where they may not wait longer."""

from types import SimpleNamespace

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.gemm.gemm import gemm
from tp_invariant_recipes.numerics.layers.formats import plain
from tp_invariant_recipes.numerics.layers.linear import row_parallel
from tp_invariant_recipes.numerics.sums import later, tree, weight_gradient
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

TWO = VirtualMesh(2, 2, 0)


@pytest.fixture
def events(monkeypatch):
    """What a backward pass does, in order. The other rank has what this one has."""
    done = []

    def gather(slices, mesh):
        done.append("gather")
        return tree.Moving(slices.repeat(2, 1))

    monkeypatch.setattr(tree, "start_all_gather", gather)
    monkeypatch.setattr(
        plain,
        "start_reduce_scatter",
        lambda nodes, mesh: SimpleNamespace(finished=lambda dtype: nodes.sum(0)[: nodes.shape[1] // 2].to(dtype)),
    )
    return done


def layers(events, count, uses=1, main_grad=True):
    """Rows of a chain of row-parallel layers, and their weights; each weight is used so often, one after the other."""

    def noting(a, b, out, *, add=False, **shards):
        events.append("dw" if add else "dx")
        return gemm(a, b, out, add=add, **shards)

    operands = plain.Plain(plain.Gemms(noting, plain.LIBRARY.partials))
    rows = torch.randn(4, 1, 8, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(count)]
    for weight in weights if main_grad else ():
        weight.main_grad = torch.zeros(8, 8)
    x = rows
    for weight in (weight for weight in weights for _ in range(uses)):
        x = row_parallel(x, weight, TWO, True, operands).repeat(2, 1, 1)
    return x, weights


def test_a_gemm_waits_for_the_next_gather_or_the_end(events):
    layers(events, 3)[0].sum().backward()
    assert events == ["gather", "dx", *["gather", "dw", "dx"] * 2, "dw"]


def test_none_waits_where_autograd_needs_the_gradient(events):
    x, weights = layers(events, 2, main_grad=False)
    x.sum().backward()
    assert events == ["gather", "dx", "dx"] * 2
    assert all(weight.grad.any() for weight in weights)


def test_uses_of_a_weight_are_added_in_their_order(events, monkeypatch):
    def trained():
        torch.manual_seed(0)
        x, (weight,) = layers(events, 1, uses=3)
        x.backward(torch.randn_like(x))
        return weight.main_grad

    monkeypatch.setattr(later.GEMMS, "finish", lambda: None)  # so that all wait until the end
    waited = trained()
    monkeypatch.setattr(later.GEMMS, "add", lambda gemm: gemm())
    assert same_bits(waited, trained())
    held = []
    monkeypatch.setattr(later.GEMMS, "add", lambda gemm: held.insert(0, gemm))
    other = trained()
    for gemm_ in held:
        gemm_()
    assert not same_bits(waited, other)  # the control: the last first


def test_a_bucket_that_is_reduced_before_the_pass_ends_has_all_of_it(events):
    x, (_, late) = layers(events, 2)

    def reduce(weight):
        weight_gradient.finish_all()
        events.append("reduced")

    late.register_post_accumulate_grad_hook(reduce)
    x.sum().backward()
    assert events == ["gather", "dx", "dw", "reduced", "gather", "dx", "dw"]


def test_another_pass_runs_nothing_that_a_failed_one_has_left(events):
    def fails(gradient):
        raise ZeroDivisionError

    x, (_, late) = layers(events, 2)
    late.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    assert "dw" not in events
    left = late.main_grad.clone()
    layers(events, 2)[0].sum().backward()
    assert same_bits(late.main_grad, left)
    weight_gradient.forget()
    assert not later.GEMMS._of_pass
