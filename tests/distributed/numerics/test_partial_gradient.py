# SPDX-License-Identifier: Apache-2.0
"""Gradients that wait for the end of a backward pass: which pass they belong to, and that none is lost or doubled. The
gradient norm over ranks: one value for every number of ranks that hold the gradients.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.kernels.grad_norm import largest
from tp_invariant_recipes.numerics.layers.bias import row_bias
from tp_invariant_recipes.numerics.layers.norm import NormShards, rms_norm
from tp_invariant_recipes.numerics.sums import weight_gradient
from tp_invariant_recipes.numerics.sums.grad_norm import (
    clip_by_powers_of_two,
    exact_grad_norm,
    get_grad_norm_fp32,
    largest_known,
)
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, DEGREES = 8, (1, 2, 4)
S, B, N = 1024, 2, 24  # of few tokens, chunks of any number have one sum
HEADS = 8


class Model:
    """norm → bias → norm of heads → the first norm again; slices of the sequence, or all of it on every rank."""

    def __init__(self, mesh, everywhere, main_grad=True):
        generator = torch.Generator().manual_seed(1)
        self.mesh, self.everywhere = mesh, everywhere
        kinds = ("norm", N), ("bias", N), ("heads", N)
        self.weights = {name: torch.randn(size, generator=generator).requires_grad_() for name, size in kinds}
        if main_grad:
            for weight in self.weights.values():
                weight.main_grad = torch.zeros(weight.shape)
        self.x, self.dy = (torch.randn(S, B, HEADS * N, generator=generator) for _ in range(2))

    def rows(self, whole):
        whole = whole.view(S, B, HEADS, N)
        return whole[:, :, 0].chunk(self.mesh.size)[self.mesh.rank] if not self.everywhere else whole[:, :, 0]

    def norm(self, x):
        kind = NormShards.SEQUENCE_WHOLE if self.everywhere else NormShards.SEQUENCE_SLICE
        return rms_norm(x, self.weights["norm"], 1e-6, self.mesh, kind)

    def loss(self, break_it=False):
        x = self.rows(self.x).clone().requires_grad_()
        y = self.norm(row_bias(self.norm(x), self.weights["bias"], self.mesh, not self.everywhere))
        heads = self.x.view(S, B, HEADS, N).chunk(self.mesh.size, 2)[self.mesh.rank]
        z = rms_norm(heads, self.weights["heads"], 1e-6, self.mesh, NormShards.HEADS)
        if break_it:
            x.register_hook(_fail)
        return (y * self.rows(self.dy)).sum() + (
            z * self.dy.view(S, B, HEADS, N).chunk(self.mesh.size, 2)[self.mesh.rank]
        ).sum()

    def gradients(self):
        return {n: getattr(w, "main_grad", w.grad).clone() for n, w in self.weights.items()}


def _fail(gradient):
    raise ArithmeticError("as planned")


def _backward(mesh, everywhere, main_grad):
    model = Model(mesh, everywhere, main_grad)
    model.loss().backward()
    return model.gradients()


def _collectives(mesh):
    """How many all-gathers one backward pass takes."""
    model = Model(mesh, everywhere=False)
    loss, count, original = model.loss(), [], dist.all_gather_into_tensor

    def counting(*args, **kwargs):
        count.append(1)
        return original(*args, **kwargs)

    dist.all_gather_into_tensor = counting
    loss.backward()
    dist.all_gather_into_tensor = original
    return len(count)


def _after_a_failure(mesh):
    model = Model(mesh, everywhere=False)
    with pytest.raises(ArithmeticError):
        model.loss(break_it=True).backward()
    remaining = {n: w.main_grad.clone() for n, w in model.weights.items()}
    model.loss().backward()
    return remaining, model.gradients()


def _two_passes(mesh):
    model, before = Model(mesh, everywhere=False), len(weight_gradient._waiting._of_pass)
    first, second = model.loss(), model.loss()
    first.backward()
    second.backward()
    return model.gradients(), len(weight_gradient._waiting._of_pass) - before


def _tied(mesh):
    """What autograd gets for a weight whose gradient is in main_grad, with and without zero_out_wgrad."""
    results = {}
    for zero in (True, False):
        model = Model(mesh, everywhere=False)
        weight = model.weights["norm"]
        weight.zero_out_wgrad, weight.grad_added_to_main_grad = zero, False
        model.loss().backward()
        results[zero] = weight.grad, weight.grad_added_to_main_grad, weight.main_grad
    return results


def _heads_of_contexts(mesh):
    """The gradient of a norm of heads: a rank has its groups of heads of each of two context shards."""
    leaves = terms(2 * SHARDS, 2, N).view(2, SHARDS, 2, N).chunk(mesh.size, 1)[mesh.rank].flatten(0, 1).contiguous()
    results = []
    for by_heads in (True, False):
        weight = torch.zeros(N, requires_grad=True)
        wider = replace(mesh, contexts=2)
        results.append(weight_gradient.reduce_weight_gradient(weight, leaves, wider, False, by_heads))
    return dict(zip(("right", "as tokens"), results, strict=True))


def _everything(mesh):
    cases = [(everywhere, main_grad) for everywhere in (False, True) for main_grad in (False, True)]
    return {
        "backward": {case: _backward(mesh, *case) for case in cases},
        "collectives": _collectives(mesh),
        "after a failure": _after_a_failure(mesh),
        "two passes": _two_passes(mesh),
        "tied": _tied(mesh),
        "heads of contexts": _heads_of_contexts(mesh),
    }


@pytest.fixture(scope="module")
def results():
    """Degree -> what each of its ranks computed."""
    return {t: on_ranks(t, SHARDS, _everything) for t in DEGREES}


def _whole(ranks, everywhere=False):
    """What Megatron makes of the ranks' gradients: their sum, or nothing where every rank has the whole."""
    results = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if everywhere and name != "heads":
            assert all(same_bits(part, parts[0]) for part in parts)
        else:
            assert not any(part.count_nonzero() for part in parts[1:])
        results[name] = parts[0]
    return results


def _same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("everywhere", (False, True))
@pytest.mark.parametrize("main_grad", (False, True))
def test_several_parameters_and_one_used_twice(results, everywhere, main_grad):
    first, *others = (
        _whole([rank["backward"][everywhere, main_grad] for rank in results[t]], everywhere) for t in DEGREES
    )
    assert all(_same(first, other) for other in others)


def test_the_gradients_are_correct(results):
    x, dy = Model(_Alone, True).x.view(S, B, HEADS, N), Model(_Alone, True).dy.view(S, B, HEADS, N)
    weights = {n: w.detach().double().requires_grad_() for n, w in Model(_Alone, True).weights.items()}
    plain = torch.nn.functional.rms_norm
    first = plain(x[:, :, 0].double(), (N,), weights["norm"], 1e-6) + weights["bias"]
    y, z = plain(first, (N,), weights["norm"], 1e-6), plain(x.double(), (N,), weights["heads"], 1e-6)
    ((y * dy[:, :, 0]).sum() + (z * dy).sum()).backward()
    result = _whole([rank["backward"][False, True] for rank in results[4]])
    for name, weight in weights.items():
        torch.testing.assert_close(result[name].double(), weight.grad, rtol=1e-5, atol=1e-5)


class _Alone:
    rank, size, shards = 0, 1, SHARDS


def test_groups_of_heads_are_summed_by_context_shard(results):
    first, *others = (_whole([rank["heads of contexts"] for rank in results[t]]) for t in DEGREES)
    assert all(same_bits(first["right"], other["right"]) for other in others)
    assert not any(same_bits(first["right"], other["as tokens"]) for other in others)


@pytest.mark.parametrize("degree, count", ((1, 0), (2, 1), (4, 1)))
def test_one_collective_for_all_parameters(results, degree, count):
    assert [rank["collectives"] for rank in results[degree]] == [count] * degree


@pytest.mark.parametrize("degree", DEGREES)
def test_a_failed_backward_leaves_nothing_for_the_next(results, degree):
    for rank in results[degree]:
        remaining, after = rank["after a failure"]
        assert not any(gradient.count_nonzero() for gradient in remaining.values())
        assert _same(after, rank["backward"][False, True])


def test_two_passes_add_up(results):
    totals = []
    for t in DEGREES:
        assert [rank["two passes"][1] for rank in results[t]] == [0] * t
        totals.append(_whole([rank["two passes"][0] for rank in results[t]]))
    assert all(_same(totals[0], total) for total in totals)
    once = _whole([rank["backward"][False, True] for rank in results[1]])
    for name, gradient in once.items():
        torch.testing.assert_close(totals[0][name], 2 * gradient)


@pytest.mark.parametrize("degree", DEGREES)
def test_tied_embeddings_get_zeros(results, degree):
    for rank in results[degree]:
        gradient, added, main_grad = rank["tied"][True]
        assert added
        assert not gradient.count_nonzero()
        assert same_bits(main_grad, rank["tied"][False][2])
        assert same_bits(main_grad, rank["backward"][False, True]["norm"])


SIZES = (1, 2, 4)


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(256, 48, generator=generator)
    return [weights, torch.randn(128, generator=generator) * torch.logspace(-30, 1, 128)]


def shards(mesh: VirtualMesh, dim: int) -> list[Tensor]:
    return [grad.chunk(mesh.size, min(dim, grad.dim() - 1))[mesh.rank] for grad in gradients()]


def exact(mesh: VirtualMesh, dim: int) -> float:
    return exact_grad_norm(shards(mesh, dim), [mesh.group] if mesh.group else [])


def megatron(mesh: VirtualMesh) -> float:
    return get_grad_norm_fp32(shards(mesh, 0), grad_stats_parallel_group=dist.group.WORLD)


def megatron_world(mesh: VirtualMesh) -> float:
    return get_grad_norm_fp32(shards(mesh, 0))


def floats(mesh: VirtualMesh) -> float:
    total = sum((g * g).sum() for g in shards(mesh, 0))
    dist.all_reduce(total)
    return total.sqrt().item()


def first_rank_only(mesh: VirtualMesh, value: float) -> float:
    grads = [*gradients(), torch.tensor([value])] if mesh.rank == 0 else []
    return exact_grad_norm(grads, [dist.group.WORLD])


def grid(mesh: VirtualMesh, width: int) -> float:
    """Ranks as a grid: data-parallel groups of consecutive ranks, then the other direction."""
    groups = []
    for members in (
        [list(range(n, n + width)) for n in range(0, mesh.size, width)],
        [list(range(n, mesh.size, width)) for n in range(width)],
    ):
        made = [(ranks, dist.new_group(ranks)) for ranks in members]
        groups += [group for ranks, group in made if mesh.rank in ranks]
    return exact_grad_norm(shards(mesh, 0), groups)


def dtensors(mesh: VirtualMesh) -> float:
    """Two groups of two ranks, each with its half of the gradients as DTensors over the group."""
    device_mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("model", "data"))
    halves = [g.chunk(2)[mesh.rank // 2] for g in gradients()]
    grads = [distribute_tensor(g, device_mesh["data"], [Shard(0)]) for g in halves]
    return get_grad_norm_fp32(grads, grad_stats_parallel_group=device_mesh["model"].get_group())


def mixed_dtensors(mesh: VirtualMesh) -> float:
    device_mesh = DeviceMesh("cpu", [0, 1])
    return get_grad_norm_fp32([distribute_tensor(torch.ones(4), device_mesh, [Shard(0)]), torch.ones(2)])


def with_the_largest_known(mesh: VirtualMesh) -> list[float]:
    """Of the gradients, and then of others, whose largest is another one."""
    with largest_known(largest(shards(mesh, 0))):
        first = megatron(mesh)
    return [first, *(get_grad_norm_fp32([grad * by for grad in shards(mesh, 0)]) / by for by in (2.0**10, 2.0**-20))]


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, 1e30)


def everything(mesh: VirtualMesh) -> dict:
    """All on one set of ranks, since a fork costs more than what it computes."""
    norms = {
        "as rows and as columns": [exact(mesh, dim) for dim in (0, 1)],
        "in place of Megatron's function": [megatron(mesh), megatron_world(mesh)],
        "while the largest is known, and then": with_the_largest_known(mesh),
        "of floats": floats(mesh),
        "of the first rank": [str(first_rank_only(mesh, value)) for value in SPECIAL],
    }
    if mesh.size == 4:
        norms |= {"groups one after the other": [grid(mesh, 2)], "DTensors over their group": [dtensors(mesh)]}
    return norms


@pytest.fixture(scope="module")
def norms():
    """Degree → what each rank computed."""
    return {size: on_ranks(size, 4, everything) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_of_all_sizes_have_one_norm(norms, size):
    whole = exact_grad_norm(gradients())
    for rank in norms[size]:
        exact_ones = {what: values for what, values in rank.items() if what not in ("of floats", "of the first rank")}
        assert exact_ones == {what: [whole] * len(values) for what, values in exact_ones.items()}


def test_a_sum_of_floats_has_several(norms):
    assert len({rank["of floats"] for ranks in norms.values() for rank in ranks}) > 1


def test_ranks_without_gradients_know_too(norms):
    wholes = [str(exact_grad_norm([*gradients(), torch.tensor([value])])) for value in SPECIAL]
    assert [rank["of the first rank"] for rank in norms[4]] == [wholes] * 4


def test_dtensors_among_plain_tensors_are_refused():
    with pytest.raises(RuntimeError, match="cannot be summed"):
        on_ranks(2, 2, mixed_dtensors)


@pytest.mark.parametrize("max_norm, factor", ((1.0, 0.125), (2.0, 0.25), (100.0, 1.0)))
@pytest.mark.parametrize("tensor", (False, True))
def test_megatrons_function_clips_by_powers_of_two(bridge, max_norm, factor, tensor):
    from megatron.core.optimizer import clip_grads

    from tp_invariant_recipes.cpu_host import cpu

    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, -4.0, 0.1])
    grad = parameter.grad.clone()
    with cpu.installed():
        clip = clip_by_powers_of_two(clip_grads.clip_grad_by_total_norm_fp32)
        clip([parameter], max_norm, torch.tensor([5.0]) if tensor else 5.0)
    assert torch.equal(parameter.grad, grad * factor)
