"""The gradient norm over ranks: one value for every number of ranks that hold the gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from tests.distributed.ranks import on_ranks
from tp_invariant_recipes.kernels.grad_norm import largest
from tp_invariant_recipes.numerics.sums.grad_norm import (
    clip_by_powers_of_two,
    exact_grad_norm,
    get_grad_norm_fp32,
    largest_known,
)
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

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
    results = {
        "as rows and as columns": [exact(mesh, dim) for dim in (0, 1)],
        "in place of Megatron's function": [megatron(mesh), megatron_world(mesh)],
        "while the largest is known, and then": with_the_largest_known(mesh),
        "of floats": floats(mesh),
        "of the first rank": [str(first_rank_only(mesh, value)) for value in SPECIAL],
    }
    if mesh.size == 4:
        results |= {"groups one after the other": [grid(mesh, 2)], "DTensors over their group": [dtensors(mesh)]}
    return results


@pytest.fixture(scope="module")
def results():
    """Degree → what each rank computed."""
    return {size: on_ranks(size, 4, everything) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_of_all_sizes_have_one_norm(results, size):
    whole = exact_grad_norm(gradients())
    for rank in results[size]:
        norms = {what: values for what, values in rank.items() if what not in ("of floats", "of the first rank")}
        assert norms == {what: [whole] * len(values) for what, values in norms.items()}


def test_a_sum_of_floats_has_several(results):
    assert len({rank["of floats"] for ranks in results.values() for rank in ranks}) > 1


def test_ranks_without_gradients_know_too(results):
    wholes = [str(exact_grad_norm([*gradients(), torch.tensor([value])])) for value in SPECIAL]
    assert [rank["of the first rank"] for rank in results[4]] == [wholes] * 4


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
