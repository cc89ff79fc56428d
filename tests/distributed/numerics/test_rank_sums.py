# SPDX-License-Identifier: Apache-2.0
"""Sums over data-parallel ranks: the tree, in pieces, where the ranks divide the buffer and where they do not. Losses
and other values of micro-batches: one sum for every number of data-parallel ranks. Matrices that Muon gathers:
whole, in the order of one rank, and back, for every kind of cut.
"""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.kernels.tree_add import tree_add
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.megatron.muon import MatrixCut, gathered, part_of
from tp_invariant_recipes.numerics.sums import bucket_reduction, step_values
from tp_invariant_recipes.numerics.sums.bucket_reduction import SequencePass
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.step_values import metrics_summed, separate_metrics, summed

PIECES = (2**24, 16)  # all at once, and so few numbers that several pieces are on their way
SIZES = (2, 4, pytest.param(8, marks=pytest.mark.release), pytest.param(16, marks=pytest.mark.release))
NUMBERS = (37, 150, 3)
CONTEXTS, DATA = 4, 2  # shards
LEAVES = CONTEXTS * DATA


def _reduced(mesh, reduce, numbers):
    mine = terms(mesh.size, numbers)[mesh.rank].clone()
    getattr(bucket_reduction, reduce)([mine], mesh.group)
    return mine.chunk(mesh.size)[mesh.rank].clone() if reduce == "reduce_scatter" else mine


def _of_contexts(mesh, cp, reduce, numbers):
    """The sum of one rank's context shards, which are a tree over its data shards each; and of all ranks."""
    dp, leaves = mesh.size // cp, terms(LEAVES, numbers).view(CONTEXTS, DATA, numbers)
    of_data, of_context = divmod(mesh.rank, cp)
    mine = leaves.chunk(cp)[of_context].chunk(dp, 1)[of_data]
    partials = [tree_add(item.contiguous(), torch.empty(numbers)) for item in mine]
    getattr(bucket_reduction, reduce)(partials, dist.group.WORLD, cp)
    return partials[0].chunk(mesh.size)[mesh.rank].clone() if reduce == "reduce_scatter" else partials[0]


def _reduced_parts(mesh, cuts):
    mine, parts = terms(mesh.size, cuts[-1])[mesh.rank].clone(), [*map(slice, cuts, cuts[1:])]
    bucket_reduction.reduce_scatter([mine], mesh.group, parts=parts)
    return mine[parts[mesh.rank]].clone()


def _all_sums(mesh, piece):
    bucket_reduction.PIECE = piece
    return (
        _reduced(mesh, "reduce_scatter", mesh.size * 37),
        _reduced_parts(mesh, [0, 0, *[40] * (mesh.size - 2), 53]),  # of a weight that fills no bucket
        {numbers: _reduced(mesh, "all_reduce", numbers) for numbers in NUMBERS},
    )


def _all_contexts(mesh, cp, piece):
    bucket_reduction.PIECE = piece
    return _of_contexts(mesh, cp, "reduce_scatter", 152), _of_contexts(mesh, cp, "all_reduce", 151)


def _controls(mesh):
    """The library's sum; and that of ranks that add data shard by data shard, as data-parallel ranks alone do."""
    by_library = terms(mesh.size, 150)[mesh.rank].clone()
    dist.all_reduce(by_library, group=mesh.group)
    original = bucket_reduction._by_context
    bucket_reduction._by_context = lambda arrived, cp, copies: original(arrived, 1, 1)
    return by_library, _of_contexts(mesh, 2, "all_reduce", 152)


def _tree(size, numbers):
    return tree_add(terms(size, numbers), torch.empty(numbers))


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_tree_or_its_slice_of_it(size, piece):
    slices, parts, wholes = zip(*on_ranks(size, size, _all_sums, piece), strict=True)
    assert same_bits(torch.cat(slices), _tree(size, size * 37))
    assert same_bits(torch.cat(parts), _tree(size, 53))
    for numbers in NUMBERS:
        assert all(same_bits(whole[numbers], _tree(size, numbers)) for whole in wholes)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("size, cp", ((1, 1), (2, 1), (2, 2), (4, 2), pytest.param(8, 4, marks=pytest.mark.release)))
def test_context_shards_are_added_last(size, cp, piece):
    slices, wholes = zip(*on_ranks(size, size, _all_contexts, cp, piece), strict=True)
    assert same_bits(torch.cat(slices), _tree(LEAVES, 152))
    assert all(same_bits(whole, _tree(LEAVES, 151)) for whole in wholes)  # which no ranks divide


def test_the_library_and_another_order_of_the_ranks_have_other_sums():
    for by_library, as_data in on_ranks(4, 4, _controls):
        assert not same_bits(by_library, _tree(4, 150))
        assert not same_bits(as_data, _tree(LEAVES, 152))


SHARDS, EACH = 4, 3


def _values():
    return terms(SHARDS * EACH, 50)


def _by_tree(mesh):
    mine = summed(_values().chunk(mesh.size)[mesh.rank], VirtualMesh(SHARDS, mesh.size, mesh.rank, mesh.group))
    if mesh.size > 1:
        dist.all_reduce(mine)  # as Bridge does
    return mine


def _by_the_library(mesh):
    mine = _values().chunk(mesh.size)[mesh.rank].sum(0)
    if mesh.size > 1:
        dist.all_reduce(mine)
    return mine


def _everything(mesh):
    return _by_tree(mesh), _by_the_library(mesh), _router_statistics(mesh)


@pytest.fixture(scope="module")
def results(bridge):
    """Degree → what each of its ranks computed: sums by tree and by the library, and a router's statistics."""
    return {size: [*zip(*on_ranks(size, size, _everything), strict=True)] for size in (1, 2, 4)}


def test_the_sum_is_that_of_one_rank(results):
    (alone,), (by_the_library,), _ = results[1]
    assert all(same_bits(whole, alone) for size in (2, 4) for whole in results[size][0])
    assert torch.allclose(alone, _values().sum(0), rtol=1e-4)
    assert not same_bits(results[4][1][0], by_the_library)


def _router_statistics(mesh):
    """What Megatron is given to sum over the ranks: two steps of values of three layers; the second has no router."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed():
        parallel_state.initialize_model_parallel()
        record = separate_metrics(MoEMetricsTracker.record)
        sync = metrics_summed(lambda self, names: None, SHARDS)
        tracker, result = MoEMetricsTracker(), []
        for _ in range(2):
            for values in _values().chunk(mesh.size)[mesh.rank]:
                for layer in (1, 3):
                    record(tracker, "load_balancing_loss", values[layer], layer, 3)
            sync(tracker, ["load_balancing_loss"])
            result.append(tracker.metrics["load_balancing_loss"].values.clone())
            tracker.clear()
        return result


def test_router_statistics_have_one_sum(results):
    ((alone, second),) = results[1][2]
    assert same_bits(alone, second)
    assert torch.allclose(alone, torch.tensor([1.0, 0.0, 1.0]) * _values().sum(0)[1:4], rtol=1e-3)
    for size in (2, 4):
        first, *others = results[size][2]
        assert same_bits(first[0], alone)
        assert not any(other[0].count_nonzero() for other in others)


def test_losses_of_sequences_have_one_sum_whatever_rows_they_are_packed_in(monkeypatch):
    """Of two data shards, four sequences each. Packed otherwise across the shards, they have another."""
    monkeypatch.setattr(step_values, "data_mesh", lambda shards: VirtualMesh(shards, 1, 0))

    def packed(*lengths):
        rows = [{"lm loss": row} for row in terms(8, 2).split(lengths)]
        return step_values.losses_summed(lambda: lambda: rows, 2, 1)()()[0]["lm loss"]

    assert same_bits(packed(2, 2, 2, 2), packed(3, 1, 1, 3))
    assert not same_bits(packed(2, 2, 2, 2), packed(1, 2, 2, 3))


def test_statistics_of_sequences_are_kept_by_their_numbers():
    """A layer may run twice, sequences come in any order, one that only takes part counts nowhere."""
    rows = {}
    for row, number, value, idle in ((0, 1, 1.0, False), (0, 0, 2.0, False), (0, 1, 4.0, False), (1, 0, 8.0, True)):
        bucket_reduction.enter(SequencePass(row, number, idle, metric_share=0.25))
        step_values.keep(rows, torch.tensor(value))
    bucket_reduction.enter(None)
    assert [value.item() for value in step_values.of_rows(rows)] == [1.75]


def test_losses_of_depths_begin_anew_each_step(bridge, monkeypatch):
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Megatrons

    from tp_invariant_recipes.numerics.megatron import mtp

    monkeypatch.setattr(mtp, "data_mesh", lambda shards: VirtualMesh(shards, 1, 0))
    monkeypatch.setattr(Megatrons, "tracker", {})
    save, reduce = mtp.separate_losses(lambda *_: None), mtp.losses_summed(lambda: None, SHARDS)
    expected = summed(_values(), VirtualMesh(SHARDS, 1, 0))[:2]
    for _ in range(2):
        for values in _values():
            for depth in (1, 0):
                save(values[depth], None, None, depth)
        reduce()
        assert same_bits(Megatrons.tracker["loss_values"], expected)


# The dimension, and a rank's rows or columns of each segment: q, k and v; gate and up; of Mamba; columns; not cut.
CUTS = (MatrixCut(0, (6,)), MatrixCut(0, (3, 3)), MatrixCut(0, (4, 4, 2, 2, 1)), MatrixCut(1, (4,)), None)


def _there_and_back(mesh, cut):
    local = [6, 8] if cut is None else [sum(cut.sizes) if d == cut.dim else 8 for d in range(2)]
    rank, ranks, dim, sizes = (0, 1, 0, 1) if cut is None else (mesh.rank, mesh.size, cut.dim, cut.sizes)
    shape, ranges = init.place(local, dim, rank, ranks, sizes)
    whole = torch.arange(shape[0] * shape[1]).view(shape).float()
    rows, columns = (torch.cat([torch.arange(*value) for value in segments]) for segments in ranges)
    part = whole[rows][:, columns]
    result = gathered(part.mT.contiguous().mT, cut, dist.group.WORLD)
    back = part_of(result.mT.contiguous().mT, cut, dist.group.WORLD)  # as Newton-Schulz steps of a tall matrix leave it
    return torch.equal(result, whole), torch.equal(back, part), result.is_contiguous(), back.is_contiguous()


@pytest.mark.parametrize("cut", CUTS)
def test_a_matrix_is_gathered_in_the_order_of_one_rank(cut):
    assert on_ranks(2, 4, _there_and_back, cut) == [(True,) * 4] * 2
