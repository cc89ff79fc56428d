# SPDX-License-Identifier: Apache-2.0
"""Gradients of Megatron-FSDP: one tree over data shards for every strategy and number of ranks, in Megatron's buffers;
the values of a step that ranks compute in turn.
"""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.layers import embedding
from tp_invariant_recipes.numerics.megatron.data_order import ConsecutiveBatchSampler, ConsecutiveSampler
from tp_invariant_recipes.numerics.megatron.fsdp import GradientGroup
from tp_invariant_recipes.numerics.sums import data_shards, step_values
from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.weight_gradient import gradients_of, main_grad_of

D, SHAPES = 8, ((6, 4), (3, 4))
SIZE = sum(rows * columns for rows, columns in SHAPES)

pytestmark = pytest.mark.usefixtures("bridge")


def _buffer(sharded):
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
        DataParallelBuffer,
        ParameterGroup,
        StorageResizeBasedBucketAllocator,
    )

    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads" if sharded else "optim")
    buffer = DataParallelBuffer(
        settings, weights, sharded and dist.get_world_size() > 1, 0, torch.float32, torch.device("cpu"),
        dist.group.WORLD, temporary_bucket_allocator=StorageResizeBasedBucketAllocator(), chunk_size_factor=4,
    )  # fmt: skip
    buffer.init_data(torch.zeros(buffer.data_size))
    for number, weight in enumerate(weights):
        weight.get_main_grad = lambda number=number, weight=weight: buffer.get_item_from_bucket(
            buffer.fetch_bucket(), number
        ).view(weight.shape)
    return ParameterGroup(weights, main_grad_buffer=buffer)


def _trained(mesh, passes, buffers=1, tied=False, in_turn=None):
    """This rank's slice of the gradient of two steps' second, and the numbers that the group and its counter keep.

    tied: the first weight has the gradient of lookups, too, which is added last. in_turn: how ranks take the shards.
    """
    ranks, leaves = mesh.size, terms(D, SIZE)
    each = D // ranks // buffers
    held = _buffer(passes)
    buffer, weights = held.main_grad_buffer, held.params
    counter = ShardCounter(D // ranks // buffers, 1, lambda: group.sums())
    group = GradientGroup(held, counter, passes, buffers, 1)
    for _ in range(2):
        group.buffer.data.zero_()
        group.zero()
        for step in range(each):
            turn = passes if in_turn is None else in_turn
            for source in range(buffers):
                place, start = mesh.rank * buffers + source, 0
                shard = step * ranks * buffers + place if turn else place * each + step
                for weight in weights:
                    assert main_grad_of(weight) is not None
                    leaf = leaves[shard, start : start + weight.numel()].view(weight.shape)
                    gradients_of(weight)[source].add_(leaf)
                    start += weight.numel()
            if tied:
                if getattr(weights[0], embedding.LOOKUPS, None) is None:
                    setattr(weights[0], embedding.LOOKUPS, torch.zeros(1, *weights[0].shape))
                getattr(weights[0], embedding.LOOKUPS)[0].add_(leaves[shard, : weights[0].numel()].view(SHAPES[0]) * 3)
            if passes or step == each - 1:
                group.reduce()
                buffer.free_bucket_storage()
                for weight in weights:
                    weight.main_grad = None
                    if passes:
                        setattr(weight, embedding.LOOKUPS, None)
            if counter.shards > 1:
                counter.end_micro_batch()
        group.finish()
        counter.restart()
    memory = [*group._more, *counter._free, *(tensor for free in counter._free.values() for tensor in free)]
    kept = [tensor.numel() for tensor in memory]
    return buffer.get_shard_from_local_buffer().clone(), kept


def _whole(size, *arguments):
    slices, kept = zip(*on_ranks(size, size, _trained, *arguments), strict=True)
    return torch.cat(slices)[:SIZE], kept


def _tree(factor=1.0):
    return tree_add(terms(D, SIZE) * factor, torch.empty(SIZE))


@pytest.mark.parametrize("passes", (True, False))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_every_strategy_has_the_tree(size, passes):
    gradient, kept = _whole(size, passes)
    assert same_bits(gradient, _tree())
    if passes and size > 1:  # nobody keeps a whole gradient
        assert all(numbers * size < SIZE + 4 * size for of_rank in kept for numbers in of_rank)


@pytest.mark.parametrize("passes", (True, False))
@pytest.mark.parametrize("size", (1, 2))
def test_data_shards_of_one_pass_have_gradients_of_their_own(size, passes):
    assert same_bits(_whole(size, passes, 2)[0], _tree())


@pytest.mark.parametrize("passes", (True, False))
def test_lookups_of_a_tied_weight_are_added_last(passes):
    lookups = SHAPES[0][0] * SHAPES[0][1]
    expected = _tree()
    expected[:lookups] += _tree(3.0)[:lookups]
    for size in (1, 2):
        assert same_bits(_whole(size, passes, 1, True)[0], expected)


def test_ranks_that_take_other_shards_have_another_sum():
    for passes in (True, False):
        assert not same_bits(_whole(2, passes, 1, False, not passes)[0], _tree())
    assert not same_bits(terms(D, SIZE).sum(0), _tree())


def _in_turn(mesh, turn):
    """The sum of a step's values, and the sequences of this rank."""
    data_shards.take_turns(turn)
    group = dist.group.WORLD if mesh.size > 1 else None
    sampler = ConsecutiveSampler(2 * D, 0, 1, mesh.rank, mesh.size, batch=D, shards=D)
    examples = ConsecutiveBatchSampler([[*range(D)]], mesh.rank, mesh.size, D)
    numbers = [number for [number] in sampler]
    assert [*examples] == [numbers[: D // mesh.size]]
    mine = terms(D, 50)[numbers[: D // mesh.size]]
    total = step_values.summed(mine, VirtualMesh(D, mesh.size, mesh.rank, group))
    dist.all_reduce(total)  # as Bridge does
    return total, numbers


@pytest.mark.parametrize("turn", (True, False))
def test_a_step_has_one_loss_in_either_order(turn):
    ((alone, everything),) = on_ranks(1, 1, _in_turn, False)
    for size in (2, 4):
        for rank, (total, numbers) in enumerate(on_ranks(size, size, _in_turn, turn)):
            assert same_bits(total, alone)
            expected = everything[rank::size] if turn else [n for n in everything if n % D // (D // size) == rank]
            assert numbers == expected
