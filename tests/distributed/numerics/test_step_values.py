"""Losses and other values of micro-batches: one sum for every number of data-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks, terms
from tests.operands import same_bits
from tp_invariant_recipes.numerics.sums import bucket_reduction, step_values
from tp_invariant_recipes.numerics.sums.bucket_reduction import SequencePass
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.step_values import metrics_summed, separate_metrics, summed

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

    from tp_invariant_recipes.numerics.megatron import multi_token

    monkeypatch.setattr(multi_token, "data_mesh", lambda shards: VirtualMesh(shards, 1, 0))
    monkeypatch.setattr(Megatrons, "tracker", {})
    save, reduce = multi_token.separate_losses(lambda *_: None), multi_token.losses_summed(lambda: None, SHARDS)
    expected = summed(_values(), VirtualMesh(SHARDS, 1, 0))[:2]
    for _ in range(2):
        for values in _values():
            for depth in (1, 0):
                save(values[depth], None, None, depth)
        reduce()
        assert same_bits(Megatrons.tracker["loss_values"], expected)
