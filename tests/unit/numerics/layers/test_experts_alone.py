# SPDX-License-Identifier: Apache-2.0
"""Every expert has one rank that computes it, which holds its weights. Gradients of experts: in the order of their
sources, in every format. Products of adapters, against autograd.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.row_sums import token_sum
from tp_invariant_recipes.numerics.layers.experts import experts
from tp_invariant_recipes.numerics.layers.experts.expert_adapters import adapter_linear
from tp_invariant_recipes.numerics.layers.experts.expert_placement import ExpertHosts, fits
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8, Mxfp8
from tp_invariant_recipes.numerics.layers.formats.plain import LIBRARY, PLAIN
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

DEGREES = st.sampled_from((1, 2, 4, 8))


class Group:
    def __init__(self, size, rank=0):
        self.size, self.rank = lambda: size, lambda: rank


def _ranks(tp, ep, experts):
    """The Owners of all ranks that share tokens, as Megatron numbers them."""
    size = max(tp, ep)
    config = SimpleNamespace(
        num_moe_experts=experts, tensor_model_parallel_size=tp, context_parallel_size=1, expert_model_parallel_size=ep
    )
    with patch("megatron.core.parallel_state.get_data_parallel_world_size", return_value=size // tp):
        return [ExpertHosts.from_config(config, Group(tp, rank % tp), Group(ep, rank % ep)) for rank in range(size)]


@given(tp=DEGREES, ep=DEGREES, each=st.integers(1, 3))
def test_experts_are_divided(tp, ep, each):
    experts = max(tp, ep) * each
    ranks = _ranks(tp, ep, experts)
    order = ranks[0].by_owner(torch.arange(experts))
    assert torch.equal(ranks[0].by_number(order), torch.arange(experts))
    for number, owners in enumerate(ranks):
        assert owners.rank == number
        assert owners.sources == max(1, ep // tp) == len(owners.chain)
        first = number % ep * (experts // ep) + number // ep * each
        assert order[number * owners.each :][: owners.each].tolist() == list(range(first, first + owners.each))
        held = range(number % ep * (experts // ep), (number % ep + 1) * (experts // ep))
        assert first in held
        assert first + owners.each - 1 in held
        assert owners.first_local == first - held[0]


@pytest.mark.parametrize("tp, ep, experts", ((2, 3, 12), (4, 4, 6), (3, 2, 12), (2, 4, 2)))
def test_what_does_not_divide_is_refused(tp, ep, experts):
    with pytest.raises(ConfigError, match=f"tp={tp} and ep={ep}: one must divide the other, both {experts} experts"):
        _ranks(tp, ep, experts)


@pytest.mark.parametrize(
    "experts, tp, ep, fit", ((8, 4, 2, True), (6, 4, 2, False), (6, 2, 4, False), (6, 3, 2, False), (6, 2, 6, True))
)
def test_each_expert_has_an_owner_where_both_degrees_divide_them(experts, tp, ep, fit):
    assert fits(experts, tp, ep) is fit


SIZES = (3, 0, 5, 2, 1, 4)  # tokens of six experts


def drawn(sizes, *shapes):
    """x [r, 4] and dy [r, 8], and more of such shapes."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in ((sum(sizes), 4), (sum(sizes), 8), *shapes)]


@pytest.mark.parametrize("shape", ((8, 4), (6, 8, 4)), ids=("shared", "each"))
def test_gradients_are_those_of_autograd(shape):
    batches = Batches(Groups(SIZES, torch.tensor(SIZES)), 0, 1)
    x, dy, weight = drawn(SIZES, shape)
    results, plain = ([item.clone().requires_grad_() for item in (x, weight)] for _ in range(2))
    y = adapter_linear(*results, batches, ExpertHosts(6, 1, 1))
    each = plain[1].unbind(0) if weight.dim() == 3 else [plain[1]] * 6
    wanted = torch.cat([rows @ w.t() for rows, w in zip(plain[0].split(SIZES), each, strict=True)])
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(y, wanted)
    for first, other in zip(results, plain, strict=True):
        torch.testing.assert_close(first.grad, other.grad)


def _of_owner(mesh):
    """The gradient of a shared adapter on one of two owners, of three experts each with tokens of both ranks."""
    x, dy, weight = drawn(SIZES + SIZES, (8, 4))
    batches = Batches(Groups(SIZES, torch.tensor(SIZES)), 0, 2, (0, 1))
    owners = ExpertHosts(6, 2, 2, mesh.rank, 2, mesh.group, 1, (0, 1))
    weight.requires_grad_()
    adapter_linear(x.chunk(2)[mesh.rank], weight, batches, owners).backward(dy.chunk(2)[mesh.rank])
    return weight.grad


def test_the_gradient_of_a_shared_adapter_is_a_sum_over_owners_and_sources():
    x, dy = drawn(SIZES + SIZES)
    torch.testing.assert_close(sum(on_ranks(2, 2, _of_owner)), dy.t() @ x)


@pytest.mark.parametrize("size, ep", ((4, 1), (4, 2), (4, 4)))
def test_nodes_are_in_the_order_of_experts(size, ep):
    owners = ExpertHosts(8, size, ep)
    by_owner = owners.by_owner(torch.arange(8)).view(size, -1)
    assert owners.in_order(by_owner).flatten().tolist() == [*range(8)]


FORMATS = {"plain": PLAIN, "tensorwise": Fp8(False, E5M2), "blockwise": Fp8(True, E5M2), "mxfp8": Mxfp8(LIBRARY, E4M3)}


@pytest.mark.parametrize("chain", ((0, 1), (1, 0)))
@pytest.mark.parametrize("operands", FORMATS.values(), ids=FORMATS)
def test_a_buffer_adds_its_sources_in_the_order_of_the_chain(operands, chain):
    sizes = (40, 3, 32, 64)  # two experts of two sources
    groups, draw = Groups(sizes, torch.tensor(sizes)), torch.Generator().manual_seed(0)
    x, dy = (torch.randn(sum(sizes), 128, generator=draw).bfloat16() for _ in range(2))
    (_, kept), (_, columns) = operands.from_input(x, groups=groups), operands.from_gradient(dy, None, 0, 1, groups)
    separate, before = torch.zeros(4, 128, 128), torch.randn(2, 128, 128, generator=draw)
    operands.add_gradients(columns, kept, [*separate], Batches(groups, 0, 2))
    outs = before.clone()
    operands.add_gradients(columns, kept, [*outs], Batches(groups, 0, 2, chain))
    forward, backward = (
        [out + of[a] + of[b] for out, of in zip(before, separate.view(2, 2, 128, 128), strict=True)]
        for a, b in (chain, chain[::-1])
    )
    assert same_bits(outs, torch.stack(forward))
    assert not same_bits(outs, torch.stack(backward))


def test_biases_too():
    sizes, chain = (3, 1, 2, 4), (0, 2, 1, 3)  # of one expert, from four sources
    batches, draw = Batches(Groups(sizes, torch.tensor(sizes)), 0, 4, chain), torch.Generator().manual_seed(1)
    dy, bias = torch.randn(10, 32, generator=draw), torch.zeros(32, requires_grad=True)
    experts._GroupedBias.apply(torch.zeros(10, 32), None, batches, bias).backward(dy)
    separate = [tree_sum(token_sum(rows, 1)[0]) for rows in dy.split(sizes)]
    in_order, by_source = (sum(separate[n] for n in order) for order in (chain, range(4)))
    assert same_bits(bias.grad, in_order)
    assert not same_bits(bias.grad, by_source)


def test_a_gate_of_shared_experts_has_the_gradients_of_autograd():
    draw = torch.Generator().manual_seed(0)
    out, x, weight = leaves = [torch.randn(shape, generator=draw) for shape in ((8, 2, 16), (8, 2, 16), (1, 16))]
    dy = torch.randn(8, 2, 16, generator=draw)
    for leaf in leaves:
        leaf.requires_grad_()
    results, expected = (
        torch.autograd.grad(y, leaves, dy)
        for y in (experts.token_gate(out, x, weight, VirtualMesh(2, 1, 0)), out * (x @ weight.t()).sigmoid())
    )
    for first, other in zip(results, expected, strict=True):
        torch.testing.assert_close(first, other)
