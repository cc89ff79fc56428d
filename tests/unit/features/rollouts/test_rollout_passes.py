# SPDX-License-Identifier: Apache-2.0
"""What ranks that exchange experts' tokens agree on before a pass, and which groups a CUDA graph may hold."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tp_invariant_recipes.features.rollouts import decode
from tp_invariant_recipes.features.rollouts.decode import Common, common
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.features.rollouts.schedule import Blocks, SampleState, Schedule, Span

DEVICE = torch.device("cpu")


def state(length, **sampling):
    return SampleState(Request("a", (1,) * length, Sampling(max_new_tokens=8, **sampling)), 0, 0)


def test_ranks_compute_one_kind_of_pass(monkeypatch):
    """Another rank has more rows, a prompt, a filter: without them the control is what this rank has alone."""
    spans = [Span(state(5), 1), Span(state(9, do_sample=True, top_k=0), 1)]
    assert common(spans, 17, None, DEVICE) == Common(2, 1, -1, 17)
    assert common([], 1, None, DEVICE) == Common(0, 1, -1, 1)
    limited = [Span(state(3, do_sample=True, top_k=20), 3), Span(state(4, do_sample=True, top_k=0, top_p=0.5), 4)]
    other = common(limited, 1, None, DEVICE)
    assert other == Common(7, 4, 20, 1)
    assert common(limited[1:], 1, None, DEVICE).limits == 0
    monkeypatch.setattr(decode, "greatest", lambda mine, group, device: [*map(max, mine, other)])
    assert common(spans, 17, "group", DEVICE) == Common(7, 4, 20, 17)


@pytest.mark.parametrize(
    "backends, device, expected",
    (("nccl nccl", "cuda", True), ("nccl gloo", "cuda", False), ("nccl", "cuda", True), ("nccl nccl", "cpu", False)),
)
def test_a_graph_holds_what_nccl_exchanges(monkeypatch, backends, device, expected):
    monkeypatch.setattr(decode.dist, "get_backend", lambda group: group)
    assert decode.capturable(backends.split(), torch.device(device)) == expected


def test_a_server_captures_every_size_of_rows_before_its_requests():
    """A graph of the sizes that 1 … 200 rows are filled up to, the largest first; each is computed, then captured."""
    passes = object.__new__(decode.CachedPasses)
    passes.multiple, passes.graphs, replayed = 8, True, []
    passes._inputs = lambda spans, shared: shared.rows
    passes._replayed = lambda rows, limits: replayed.append((rows, limits))
    passes.capture(200, (None, 0))
    kinds = [(rows, limits) for rows in (256, 192, 128, 64, 32, 16, 8) for limits in (None, 0)]
    assert replayed == [kind for kind in kinds for _ in range(2)]
    assert {kind[0] for kind in kinds} == {passes._sized(rows) for rows in range(1, 201)}


def test_single_rows_are_those_of_their_sequences_whoever_had_the_rows_before():
    """Sequences end, join, wait again and read prompts token by token; each pass is what its sequences alone say."""
    draw, size, total = random.Random(0), 4, 8
    made = decode.SingleRows(total, SimpleNamespace(size=size, blocks=8))
    states = [state(draw.randrange(1, 12), do_sample=True, top_k=n) for n in range(40)]
    plan, passes = Schedule(states, Blocks(9, size), 6, 1), 0
    while spans := plan.next():
        passes += 1
        rows, tables, of_states, draws, numbers = made([span.sequence for span in spans])
        drawing = []
        for n, each in enumerate(span.sequence for span in spans):
            at = each.computed
            token = [*each.request.tokens, *each.drawn][at]
            slot = each.blocks[at // size] * size + at % size
            assert rows[n].tolist() == [token, at, slot, each.state, 0]
            assert tables[n, : 2 + len(each.blocks)].tolist() == [n, 1, *each.blocks]
            assert of_states[n].tolist() == [n, 1, each.state, at == 0]
            if at + 1 == len(each):
                drawing.append([n, each.key, each.sample, len(each.drawn), *each.request.sampling.numbers])
        filler = [[0, 0, 0, 0, *decode.NO_DRAW]] * (total - len(drawing))
        assert np.hstack([draws, numbers]).tolist() == drawing + filler
        assert rows[len(spans) :].tolist() == [[0] * 5] * (total - len(spans))
        assert not tables[len(spans) :].any()
        assert not of_states[len(spans) :].any()
        for span in spans:
            drew = span.draws
            plan.computed(span)
            if drew:
                span.sequence.drawn.append(draw.randrange(9))
                if draw.random() < 0.2 or len(span.sequence) == span.sequence.most:
                    plan.end(span.sequence)
    assert plan.preemptions
    assert passes > 40
