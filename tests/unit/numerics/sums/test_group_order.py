# SPDX-License-Identifier: Apache-2.0
"""Expert groups: in every layout the terms of an expert's gradient are added in one order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.sums.expert_groups import ExpertGroups, order_of_visits, reversed_bits
from tp_invariant_recipes.settings import expert_groups
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.schema import PROVIDER, SFT_DATASET

POWERS = (1, 2, 4, 8)
Term = tuple[int, int, int]  # sequence of a shard, data shard, context shard


MORE = (*itertools.product((1, 2, 4), (4,)), (8, 2), (8, 4))


def order_of_terms(sums: ExpertGroups, each: int) -> set[tuple[Term, ...]]:
    """The terms of each group in the order in which a place of the layout adds them. each: sequences of a shard."""
    shards, contexts = sums.data // sums.dp, sums.contexts // sums.cp
    visits = order_of_visits(shards, each, sums.turns)
    results = set()
    for data, context in itertools.product(*map(range, sums.places)):
        terms: dict[tuple[int, int], list[Term]] = {}
        for number, visit in enumerate(visits):
            shard, sequence = divmod(visit, each)
            sources = [
                (sequence, (data * sums.data_ranks + rank) * shards + shard, c)
                for rank in range(sums.data_ranks)
                for c in range(context * sums.context_ranks * contexts, (context + 1) * sums.context_ranks * contexts)
            ]
            for buffer in range(sums.data_buffers * sums.context_buffers):
                added = [sources[buffer * len(sums.chain) + link] for link in sums.chain]
                terms.setdefault((number // (sums.turns * each), buffer), []).extend(added)
        results |= {tuple(of_group) for of_group in terms.values()}
    return results


def layouts(groups: int, data: int, contexts: int) -> list[ExpertGroups]:
    """All that may have so many groups."""
    return [
        sums
        for tp, cp, dp, ep in itertools.product((1, 2), POWERS, POWERS, (*POWERS, 16))
        if contexts % cp == data % dp == 0 and ep <= tp * cp * dp
        if (sums := ExpertGroups(groups, data, contexts, tp, cp, dp, ep)).fits
    ]


@pytest.mark.parametrize(
    "data, contexts",
    (*itertools.product((1, 2, 4), (1, 2)), (8, 1), *(pytest.param(*at, marks=pytest.mark.release) for at in MORE)),
)
def test_every_layout_adds_the_same_terms_in_the_same_order(data, contexts):
    for groups in (2**n for n in range((data * contexts).bit_length())):
        every = layouts(groups, data, contexts)
        for each in (1, 3):
            first, *others = (order_of_terms(sums, each) for sums in every)
            assert len(first) == groups
            assert {len(terms) for terms in first} == {data * contexts * each // groups}
            assert all(terms == first for terms in others)


def test_another_order_of_sources_is_not_that_of_other_layouts():
    grouped = ExpertGroups(1, 4, 1, 1, 1, 2, 2)
    alone = ExpertGroups(1, 4, 1, 1, 1, 1, 1)
    assert order_of_terms(grouped, 1) == order_of_terms(alone, 1) == {((0, 0, 0), (0, 2, 0), (0, 1, 0), (0, 3, 0))}

    class InOrder(ExpertGroups):
        chain = (1, 0)

    assert order_of_terms(InOrder(1, 4, 1, 1, 1, 2, 2), 1) != order_of_terms(alone, 1)


@given(data=st.sampled_from(POWERS), each=st.integers(1, 4), turns=st.sampled_from(POWERS))
def test_a_rank_visits_each_sequence_once_and_those_of_a_shard_in_order(data, each, turns):
    visits = order_of_visits(data, each, min(turns, data))
    assert sorted(visits) == [*range(data * each)]
    for shard in range(data):
        mine = [visit for visit in visits if visit // each == shard]
        assert mine == sorted(mine)
    assert turns > 1 or visits == sorted(visits)


def test_reversed_bits():
    assert [reversed_bits(n) for n in (1, 2, 4)] == [[0], [0, 1], [0, 2, 1, 3]]


def _config(model, words):
    return compose(model, parse_all(words.split()), device="cpu").config


DEFAULTS = {
    "": 1, "dp=2": 2, "dp=2 ep=2": 1, "dp=4 ep=2": 2, "tp=2 dp=2 ep=2": 2, "tp=2 dp=2 ep=4": 1, "cp=2": 2,
    "cp=2 ep=2": 1, "dp=2 cp=2": 4, "dp=2 cp=2 ep=2": 2, "numerics.data_shards=4": 1,
    "cp=2 numerics.data_shards=4": 8,
}  # fmt: skip


@pytest.mark.parametrize("layout", DEFAULTS)
def test_the_default_is_the_least_that_the_layout_can_have(layout):
    config = _config("qwen3_moe_toy", f"gbs=4 seq=64 {layout}")
    assert config.numerics.expert_groups == DEFAULTS[layout]


@pytest.mark.parametrize("packed", (False, True))
def test_packed_rows_have_a_group_for_each_data_shard(packed):
    sections = {
        "model": {"num_moe_experts": 8, "expert_model_parallel_size": 4},
        "numerics": {"mode": "tree", "data_shards": 4},
        "parallel": {"data_parallel_size": 4},
        "dataset": {PROVIDER: SFT_DATASET, "enable_offline_packing": packed},
    }
    config = RunConfig(sections)
    assert expert_groups.groups_of_run(config) == (4 if packed else 1)
    assert expert_groups.adds_several_times(config) == ("dataset.enable_offline_packing" if packed else None)


def test_a_dense_model_has_none():
    assert _config("qwen3_toy", "dp=2 gbs=2").numerics.expert_groups is None


REFUSED = {
    "numerics.expert_groups=3": "numerics.expert_groups=3: must be a power of two",
    "dp=4 numerics.expert_groups=8": "numerics.data_shards * numerics.context_shards are 4; numerics.expert_groups=4",
    "dp=4 numerics.expert_groups=2": "in 4 places; numerics.expert_groups=4, or ep=2",
    "dp=2 cp=2 ep=2 numerics.expert_groups=1": "in 2 places; numerics.expert_groups=2, or ep=4",
    "numerics=stock numerics.expert_groups=1": "numerics=stock has no expert groups; leave it out",
    "dp=2 ep=2 model.mtp_num_layers=2 model.mtp_use_repeated_layer=true numerics.expert_groups=1": "with "
    "model.mtp_use_repeated_layer a backward pass adds to an expert's gradient several times; numerics.expert_groups=2",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_layout_cannot_have_is_refused(words):
    with pytest.raises(ConfigError) as refusal:
        _config("qwen3_moe_toy", f"gbs=4 seq=64 {words}")
    assert REFUSED[words] in str(refusal.value)


def test_a_dense_model_is_refused_several_fields():
    with pytest.raises(ConfigError, match="the model has no experts; leave it out"):
        _config("qwen3_toy", "numerics.expert_groups=1")
