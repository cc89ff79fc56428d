# SPDX-License-Identifier: Apache-2.0
"""Which sequences a data-parallel rank computes, in which order, and when it reads them."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from tp_invariant_recipes.numerics.megatron import graph_room
from tp_invariant_recipes.numerics.megatron.data_order import ConsecutiveBatchSampler, ConsecutiveSampler, in_turns
from tp_invariant_recipes.numerics.sums import expert_groups

BATCH, STEPS = 8, 2


def _of_rank(rank, dp, mbs=1, consumed=0, total=BATCH * STEPS + 3, **more):
    return list(ConsecutiveSampler(total, consumed, mbs, rank, dp, batch=BATCH, **more))


@pytest.mark.parametrize("dp", (1, 2, 4, 8))
def test_a_rank_has_consecutive_sequences_of_each_step(dp):
    each = BATCH // dp
    for rank in range(dp):
        steps = [step * BATCH + rank * each + i for step in range(STEPS) for i in range(each)]
        assert _of_rank(rank, dp) == [[step] for step in steps]


def test_the_ranks_of_two_halves_have_the_sequences_of_one():
    for first in (0, 2):
        halves = [item for rank in (first, first + 1) for item in _of_rank(rank, 4)[: BATCH // 4]]
        assert halves == _of_rank(first // 2, 2)[: BATCH // 2]


def test_a_micro_batch_of_several_has_them_in_order():
    assert _of_rank(1, 2, mbs=2)[:2] == [[4, 5], [6, 7]]


def test_a_resumed_run_goes_on_where_it_was():
    assert _of_rank(1, 2, consumed=BATCH) == _of_rank(1, 2)[BATCH // 2 :]


def test_validation_restarts_after_its_last_whole_step():
    for passes in (0, 1, 3):
        used = passes * BATCH * STEPS + BATCH
        sampler = ConsecutiveSampler(BATCH * STEPS + 3, used, 2, 1, 2, batch=BATCH, cyclic=True)
        assert list(sampler) == [[12, 13], [14, 15]]
        assert list(sampler) == list(sampler) == [[4, 5], [6, 7], [12, 13], [14, 15]]


def test_validation_on_less_than_a_step_is_an_error():
    with pytest.raises(ValueError, match="no sequences are left: 0 of 7 are used"):
        _of_rank(0, 1, total=7, cyclic=True)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="3 ranks of 1 do not divide 8 sequences"):
        _of_rank(0, 3)
    with pytest.raises(ValueError, match="no sequences are left: 8 of 8 are used"):
        _of_rank(0, 1, consumed=8, total=8)


EXAMPLES = [[5, 3, 1, 0], [2, 7, 6, 4]]  # of two steps


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_ranks_have_consecutive_examples_of_each_step(ranks):
    of_ranks = [list(ConsecutiveBatchSampler(EXAMPLES, rank, ranks)) for rank in range(ranks)]
    assert [[n for part in parts for n in part] for parts in zip(*of_ranks, strict=True)] == EXAMPLES


def test_ranks_that_do_not_divide_a_step_are_an_error():
    with pytest.raises(ValueError, match="3 ranks do not divide the 4 examples"):
        list(ConsecutiveBatchSampler(EXAMPLES, 0, 3))


@pytest.mark.parametrize("fails", (False, True))
def test_a_step_in_turns_ends_with_its_passes(monkeypatch, fails):
    """What is evaluated after it comes in its own order; losses have that of the data."""
    visits = (0, 2, 1, 3)
    monkeypatch.setattr(expert_groups, "visits_of", lambda config: visits)

    def run(*, data_iterator, model):
        batches = [next(data_iterator) for _ in visits]
        assert [expert_groups.visited(number) for number in range(4)] == [*visits]
        return batches if not fails else 1 / 0

    step = in_turns(lambda: run)()
    model = [SimpleNamespace(config=object())]
    if fails:
        with pytest.raises(ZeroDivisionError):
            step(data_iterator=iter("abcd"), model=model)
    else:
        assert step(data_iterator=iter("abcd"), model=model) == [*"abcd"]
    assert [expert_groups.visited(number) for number in range(4)] == [0, 1, 2, 3]


class _Graphs(FullCudaGraphWrapper):
    """Megatron's, whose steps only read. graph: whether there is one."""

    def __init__(self, function, graph):
        self.cuda_graph, self.static_loader = {"training": graph}, lambda batch, stage, number: batch

    def __call__(self, **kwargs):
        (data,) = self.data_read(kwargs["data_iterator"], kwargs["model"], True, kwargs["num_microbatches"])
        return [*data]


@pytest.mark.parametrize("listed", (False, True))
@pytest.mark.parametrize("graph", (None, "graph"))
def test_the_host_reads_the_next_steps_data_while_a_graph_is_replayed(graph, listed):
    source = iter(range(10))
    steps, kwargs = (
        graph_room.with_room(_Graphs)(print, graph),
        {"model": [torch.nn.Linear(1, 1)], "num_microbatches": 4},
    )
    kwargs["data_iterator"] = [source] if listed else source
    assert steps(**kwargs) == [0, 1, 2, 3]
    assert [*steps.ahead] == ([4, 5, 6, 7] if graph else [])
    assert steps(**kwargs | {"num_microbatches": 3}) == [4, 5, 6]
    assert steps(**kwargs | {"num_microbatches": 2}) == [7, 8]
    with pytest.raises(StopIteration):  # no whole step is left
        steps(**kwargs)
