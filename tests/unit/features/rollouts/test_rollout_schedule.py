# SPDX-License-Identifier: Apache-2.0
"""The schedule of rollouts against a model of a cache that notes what each slot holds."""

import random
from itertools import pairwise

import pytest

from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.features.rollouts.schedule import SCRATCH, Blocks, SampleState, Schedule, prefixes


def sequences(count=9, seed=0, longest=40):
    """Prompts of which some begin alike, each with one to three samples."""
    draw = random.Random(seed)
    stem = [draw.randrange(50) for _ in range(longest)]
    made = []
    for number in range(count):
        own = [draw.randrange(50) for _ in range(draw.randrange(1, 9))]
        tokens = stem[: draw.choice((0, 8, 17, longest))] + own if number % 4 else stem
        request = Request(f"r{number}", tuple(tokens), Sampling(max_new_tokens=draw.randrange(1, 12)))
        made += [SampleState(request, sample, 0) for sample in range(draw.randrange(1, 4))]
    return made


def following(tokens):
    """The token that the model of a cache draws."""
    return sum(tokens) % 50


def run(made, *, count=200, size=8, most=4, chunk=16):
    """Complete all. returns: the schedule and the rows that each pass had; raises where a row sees another's keys."""
    blocks = Blocks(count, size)
    plan, held, passes = Schedule(made, blocks, most, chunk), {}, []
    while spans := plan.next():
        assert len(plan.running) <= most
        assert sum(span.count for span in spans) <= max(chunk, most)
        for span in spans:
            whole = span.sequence.tokens(0, len(span.sequence))
            for position in range(span.sequence.computed, span.sequence.computed + span.count):
                block = span.sequence.blocks[position // size]
                assert block != SCRATCH
                held[block * size + position % size] = whole[: position + 1]
        for span in spans:  # all keys of a pass are stored before a row reads them
            end = span.sequence.computed + span.count
            slots = (span.sequence.blocks[p // size] * size + p % size for p in range(end))
            assert [held[slot][-1] for slot in slots] == [*span.sequence.tokens(0, end)]
            drawing = span.draws
            plan.computed(span)
            if drawing:
                span.sequence.drawn.append(following(span.sequence.tokens(0, end)))
                if len(span.sequence.drawn) == span.sequence.request.sampling.max_new_tokens:
                    plan.end(span.sequence)
        passes.append([span.count for span in spans])
    assert (plan.running, [*plan.waiting]) == ([], [])
    assert blocks.free == count
    return plan, passes


def drawn(made):
    return [sequence.drawn for sequence in made]


@pytest.fixture(scope="module")
def expected():
    made = sequences()
    run(made, most=1, chunk=100)
    return drawn(made)


@pytest.mark.parametrize("settings", ({}, {"chunk": 1}, {"chunk": 5, "most": 9}, {"size": 1}, {"size": 64}), ids=str)
def test_all_complete_alike(settings, expected):
    made = sequences()
    run(made, **settings)
    assert drawn(made) == expected


def test_preempted_ones_complete_alike(expected):
    made = sequences()
    plan, _ = run(made, count=9, most=6)
    assert plan.preemptions > 0
    assert drawn(made) == expected


def test_samples_and_equal_beginnings_are_computed_once():
    request = Request("a", tuple(range(33)), Sampling(max_new_tokens=3))
    made = [SampleState(request, sample, 0) for sample in range(3)]
    made.append(SampleState(Request("b", (*range(16), 1), Sampling(max_new_tokens=1)), 0, 0))
    _, passes = run(made, most=8, chunk=20)
    assert sum(map(sum, passes)) == 33 + 1 + 1 + 1 + 3 * 2  # the last token of each prompt, and what was drawn
    alone = [
        run([sequence], most=8, chunk=20)[1] for sequence in (SampleState(request, 0, 0), SampleState(request, 1, 0))
    ]
    assert sum(sum(map(sum, passes)) for passes in alone) == 2 * (33 + 2)


def test_a_sequence_joins_as_soon_as_another_ends():
    made = [SampleState(Request(f"{n}", (n,), Sampling(max_new_tokens=n)), 0, 0) for n in (1, 4, 2, 2)]
    _, passes = run(made, most=2, chunk=8)
    assert passes == [[1, 1], [1, 1], [1, 1], [1, 1], [1]]


def test_long_prompts_come_in_chunks():
    _, passes = run([SampleState(Request("a", tuple(range(50)), Sampling(max_new_tokens=1)), 0, 0)], chunk=16)
    assert passes == [[16], [16], [16], [2]]


def test_a_name_is_of_the_whole_prefix():
    names = prefixes([1, 2, 3, 4, 5], 2)
    assert len(names) == 2
    assert names[0] != prefixes([3, 4], 2)[0] != names[1]
    assert prefixes([1, 2, 9, 4], 2)[0] == names[0]
    assert all(a != b for a, b in pairwise(prefixes([7] * 8, 2)))


def test_a_block_that_is_taken_forgets_its_prefix():
    blocks = Blocks(2, 4)
    first = blocks.take(1)
    blocks.name(first[0], b"a")
    blocks.give_back(first)
    assert blocks.shared([b"a", b"b"]) == first
    assert sorted(blocks.take(2)) == [1, 2]
    assert blocks.shared([b"a"]) == []


def test_running_sequences_wait_again_with_all_that_they_held_given_back():
    """Again and again, in their order; one that waits and one that runs may leave."""
    made = [SampleState(Request(f"{n}", tuple(range(n, 20)), Sampling()), 0, 0) for n in range(6)]
    plan = Schedule(made, Blocks(40, 8), 4, 100)
    for _ in range(9):
        for span in plan.next():
            plan.computed(span)
        assert [*plan.running, *plan.waiting] == made
        assert len({sequence.state for sequence in plan.running}) == len(plan.running) == 4
        plan.forget()
        assert [*plan.waiting] == made
        assert plan.blocks.free == 40
        assert plan.blocks.shared(prefixes(range(8), 8)) == []
    plan.next()
    plan.leave(made[0])
    plan.leave(made[5])
    assert [*plan.running, *plan.waiting] == made[1:5]
