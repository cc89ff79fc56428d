# SPDX-License-Identifier: Apache-2.0
"""Draws of tokens: the CPU's loops against the definition, the distribution, and transformers' filters."""

import math

import numpy as np
import pytest
import torch

from tests.definitions import draws
from tests.definitions.elementwise import numpy_version
from tp_invariant_recipes.features.rollouts.requests import Sampling
from tp_invariant_recipes.kernels.digest import row_digest
from tp_invariant_recipes.portable.ieee import draw as ieee
from tp_invariant_recipes.portable.ieee.draw import draw, request_key

GREEDY = Sampling()
SAMPLINGS = (
    GREEDY,
    Sampling(do_sample=True, top_k=0),
    Sampling(do_sample=True, top_k=7),
    Sampling(do_sample=True, top_k=0, top_p=0.7),
    Sampling(do_sample=True, top_k=40, top_p=0.9, temperature=0.6),
    Sampling(do_sample=True, top_k=1),
    Sampling(do_sample=True, top_k=0, top_p=1e-9, temperature=3.0),
    Sampling(do_sample=True, top_k=5000, top_p=0.99, temperature=1.7),
)


def rows(count, vocabulary, kind, seed=0):
    """Log-probabilities; "ties": of few values, "masked": half of the tokens have none, "sharp": of 1e-30 and less."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=random) * (20 if kind == "sharp" else 2)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, ::2] = -math.inf
    return logits.log_softmax(-1)


def keys(count, position=3):
    return torch.tensor([[request_key(5, f"r{n}"), n % 4, position] for n in range(count)])


def numbers(samplings):
    return torch.tensor([sampling.numbers for sampling in samplings], dtype=torch.float64)


def inputs(count, vocabulary, kind):
    """Arguments of `draw`, a row for each of SAMPLINGS and then from the first one on again."""
    samplings = [SAMPLINGS[n % len(SAMPLINGS)] for n in range(count)]
    return rows(count, vocabulary, kind), keys(count), numbers(samplings)


def drawn(scores, row_keys, samplings):
    return draw(scores, row_keys, numbers(samplings)).tolist()


def limits_of(scores, numbers):
    return ieee.kept(scores, scores.amax(-1), numbers)


KINDS = ("normal", "ties", "masked", "sharp")


@pytest.mark.parametrize("kind, vocabulary", (*((kind, 300) for kind in KINDS), ("ties", 5003)))
def test_draws_are_as_defined(kind, vocabulary):
    count = 2 * len(SAMPLINGS)
    scores, samplings = rows(count, vocabulary, kind), SAMPLINGS * 2
    expected = [
        draws.drawn(row, key, sampling)
        for row, key, sampling in zip(scores.numpy(), keys(count).tolist(), samplings, strict=True)
    ]
    assert drawn(scores, keys(count), samplings) == expected
    # The control: other random numbers draw other tokens, but for greedy ones and those of one token.
    others = drawn(scores, keys(count, position=4), samplings)
    differing = {n % len(SAMPLINGS) for n in range(count) if others[n] != expected[n]}
    assert not differing & ({0, 6} if kind == "ties" else {0, 5, 6})  # a draw of one token
    assert differing or kind == "sharp"  # of which nearly all mass is one token's


def test_filters_are_as_defined():
    for kind in KINDS:
        scores = rows(len(SAMPLINGS), 700, kind)
        limits = limits_of(scores, numbers(SAMPLINGS)).tolist()
        for row, sampling, (limit, last) in zip(scores.numpy(), SAMPLINGS, limits, strict=True):
            order = numpy_version("order_key")(row)
            inside = {n for n in range(700) if order[n] > limit or (order[n] == limit and n <= last)}
            assert inside == (set(draws.kept(row, sampling)) if sampling.do_sample else set(range(700)))


def test_both_zeros_are_one_value():
    """Top-k keeps all of equals; top-p those with the least ids."""
    scores = torch.tensor([[-5.0, -0.0, 0.0, -0.0, -9.0]])
    for last, sampling in ((3, {"top_k": 1}), (3, {"top_k": 3}), (0, {"top_k": 4}), (1, {"top_k": 1, "top_p": 0.3})):
        assert limits_of(scores, numbers([Sampling(do_sample=True, **sampling)]))[0].tolist()[1] == last


def test_top_p_needs_all_of_its_mass():
    """Half a unit more than the first token's mass needs the second one too."""
    scores = torch.tensor([[-math.log(2), -math.log(2), -math.inf]])
    for top_p, last in ((0.5, 0), (0.5 + 2.0**-42, 1)):
        assert limits_of(scores, numbers([Sampling(do_sample=True, top_k=0, top_p=top_p)]))[0].tolist()[1] == last


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary, count", ((5003, 3), (5120, 19), (700, 300)))
def test_the_greatest_of_runs_are_the_greatest_of_all(kind, vocabulary, count):
    scores = rows(4, vocabulary, kind)
    expected = scores.sort(descending=True).values[:, :count]
    assert torch.equal(ieee.greatest(scores, count), expected)
    assert torch.equal(ieee.greatest(scores.sort().values, count), expected)  # all of them in few runs


def test_rows_without_filters_need_none():
    scores, row_keys = rows(4, 5003, "normal"), keys(4)
    for sampling in SAMPLINGS[:2]:
        columns = numbers([sampling] * 4)
        assert torch.equal(draw(scores, row_keys, columns, limits=None), draw(scores, row_keys, columns))
    filtered = numbers([SAMPLINGS[3]] * 4)  # the control
    many = torch.cat([row_keys + n for n in range(50)]), filtered.repeat(50, 1)
    wide = scores.repeat(50, 1)
    assert not torch.equal(draw(wide, *many, limits=None), draw(wide, *many))


def test_philox_has_the_published_words():
    """Known answers of Random123 (kat_vectors, philox4x32 10)."""
    assert draws.philox(0, (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (0xFFFFFFFF,) * 4
    assert draws.philox(0xFFFFFFFFFFFFFFFF, ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert draws.philox(0x299F31D0A4093822, pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_waiting_times_are_exponential():
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *range(3, 2**32, 40_000_003), *range(77, 2**25, 100_003)]
    words = np.array(words, np.uint64)
    times = numpy_version("waiting_time")(words.astype(np.uint32).view(np.int32))
    v = np.minimum((words.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    exact = -np.log1p(-v)
    assert np.abs(times / exact - 1).max() < 2e-5  # v itself is rounded to fp32, next to 1 too
    assert np.abs(times / exact - 1)[v < 0.5].max() < 4e-7
    assert times.min() > 0


def chi_square(counts, probabilities, draws_made):
    expected = probabilities * draws_made
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "sampling", (SAMPLINGS[1], SAMPLINGS[4], *(pytest.param(s, marks=pytest.mark.release) for s in SAMPLINGS[2:4]))
)
def test_tokens_come_as_often_as_they_should(sampling):
    """The 99.9th percentile of chi-square is about n + 3.1 sqrt(2 n) + 6. Control: another temperature is beyond it."""
    scores, made = rows(1, 50, "normal", seed=1), 40_000
    row_keys = torch.tensor([[request_key(9, "r"), n % 8, n // 8] for n in range(made)])
    tokens = draw(scores.expand(made, -1).contiguous(), row_keys, numbers([sampling]).expand(made, -1))
    counts = np.bincount(tokens.numpy(), minlength=50)
    tokens_kept = sorted(draws.kept(scores[0].numpy(), sampling))
    n = len(tokens_kept)
    assert counts.sum() == counts[tokens_kept].sum() == made

    def distance(temperature):
        heavy = np.exp(scores[0].double().numpy()[tokens_kept] / temperature)
        return chi_square(counts[tokens_kept], heavy / heavy.sum(), made)

    limit = n + 3.1 * math.sqrt(2 * n) + 6
    assert distance(sampling.temperature) < limit
    assert distance(sampling.temperature * 1.1) > limit


@pytest.mark.parametrize("sampling", SAMPLINGS[2:])
def test_the_tokens_of_transformers_stay(sampling):
    """Of equals too, without top-p, which needs an order. Its sums are rounded: at the edge of top-p a token more or
    less may stay.
    """
    from transformers.generation import logits_process as expected

    scores = rows(20, 2000, "normal" if sampling.top_p < 1 else "ties", seed=2)
    processors = [expected.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        processors.append(expected.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(expected.TopPLogitsWarper(sampling.top_p))
    values = scores.double()
    for processor in processors:
        values = processor(torch.empty(20, 0, dtype=torch.int64), values)
    for row, filtered in zip(scores.numpy(), values, strict=True):
        stayed = set(torch.isfinite(filtered).nonzero().flatten().tolist())
        assert len(stayed ^ set(draws.kept(row, sampling))) <= (sampling.top_p < 1)


def test_rows_do_not_depend_on_each_other():
    """Of their order and number; the control is another key."""
    count = len(SAMPLINGS)
    scores, row_keys = rows(count, 5003, "normal"), keys(count)
    whole = drawn(scores, row_keys, SAMPLINGS)
    alone = [drawn(scores[n : n + 1], row_keys[n : n + 1], SAMPLINGS[n : n + 1])[0] for n in range(count)]
    assert whole == alone
    assert drawn(scores.flip(0), row_keys.flip(0), SAMPLINGS[::-1]) == whole[::-1]
    assert drawn(scores, row_keys.flip(0), SAMPLINGS) != whole


@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_a_row_without_a_distribution_draws_nothing(bad):
    scores = rows(3, 300, "normal")
    scores[1, 7] = bad
    for sampling in SAMPLINGS:
        tokens = drawn(scores, keys(3), [sampling] * 3)
        assert tokens[1] == -1
        assert min(tokens[0], tokens[2]) >= 0
    assert drawn(torch.full((1, 300), -math.inf), keys(1), [GREEDY]) == [-1]


def test_keys_depend_on_seed_and_id():
    made = {request_key(seed, name) for seed in (0, 1, 11) for name in ("", "1", "a", "é", "1 a", "\ud800")}
    assert len(made) == 18
    assert all(-(2**63) <= key < 2**63 for key in made)


def test_digests_of_shards_add_up():
    scores = rows(4, 300, "normal")
    whole = row_digest(scores, 0, 300)
    parts = row_digest(scores[:, :100], 0, 300) + row_digest(scores[:, 100:], 100, 300)
    assert torch.equal(whole, parts)
    changed = scores.clone()
    changed.view(torch.int32)[2, 250] ^= 1
    differing = (row_digest(changed, 0, 300) != whole).tolist()
    assert differing == [False, False, True, False]
    assert not torch.equal(row_digest(scores.flip(1), 0, 300), whole)
