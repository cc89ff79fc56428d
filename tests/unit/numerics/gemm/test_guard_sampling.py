# SPDX-License-Identifier: Apache-2.0
"""Samples of products: which are drawn, what they hold, and what the judge says of right and wrong ones."""

import random

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.gemm import cpu, defined, gemm, judge, sampling
from tp_invariant_recipes.numerics.gemm.operands import every_part
from tp_invariant_recipes.numerics.gemm.sampling import DEFINED, LIBRARY, Sample, Sampler, Where


@pytest.fixture
def sampler():
    single = Sampler(1, "a seed")
    single.everything = True
    sampling.use(single)
    yield single
    sampling.use(None)


def operands(m=48, k=64, n=80, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(dtype)
    return a, torch.randn(n, k, generator=generator).to(dtype).t()


def flipped(sample):
    sample.out.view(-1)[3] = -sample.out.view(-1)[3]
    return judge.difference(sample.out, judge.expected(sample))


def test_the_draw_follows_from_seed_step_and_count_alone():
    def chosen(seed, step):
        sampler = Sampler(4, seed)
        sampler._products = 1000
        torch.manual_seed(random.randrange(1000))
        before = torch.get_rng_state()
        sampler.restart(step)
        assert same_bits(torch.get_rng_state().view(torch.int32), before.view(torch.int32))
        return sampler._chosen

    assert chosen("1 0", 7) == chosen("1 0", 7)
    assert len({frozenset(chosen(f"1 {rank}", step)) for rank in range(4) for step in range(4)}) == 16
    assert all(len(chosen("1 0", step)) == 4 for step in range(4))


def test_as_many_products_are_taken_as_asked(sampler):
    sampler.everything, sampler.count = False, 3
    a, b = operands()
    for step in (1, 2, 3):
        sampler.restart(step)
        for _ in range(20):
            gemm.gemm(a, b, torch.empty(48, 80))
        assert len(sampler.samples) == (1 if step == 1 else 3)  # the first step does not know its products


@pytest.mark.parametrize("size", (1, 15, 16, 17, 31, 32, 100, 4096, 4100))
def test_rows_are_spread_evenly_over_all_of_them(size):
    rows = range(size)[sampling._spread(size, random.Random(size))]
    assert len(rows) == min(size, 16)
    assert rows[0] < max(1, size // 16 * 2)
    assert size - rows[-1] <= max(1, size // 16 * 2) + 15


@pytest.mark.parametrize("add", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_a_defined_product_is_judged_by_its_sample(sampler, add, dtype):
    a, b = operands()
    out = torch.randn(48, 80).to(torch.float32 if add else dtype)
    defined.compute(a, b, out, add)
    (sample,) = sampler.samples
    assert (sample.kind, sample.out.shape, sample.a.shape) == (DEFINED, (1, 16, 16), (16, 64))
    assert judge.difference(sample.out, judge.expected(sample)) is None
    assert flipped(sample) == judge.UnlikeBits(1, 256, 1)


@pytest.mark.parametrize("cut", ({}, {"rows": 4}, {"columns": 5}, {"columns": (32, 48)}))
@pytest.mark.parametrize("add", (False, True))
def test_a_librarys_product_is_judged_shard_by_shard(sampler, cut, add):
    a, b = operands()
    gemm.gemm(a, b, torch.randn(48, 80), add=add, **cut)
    shards = max(1, *(len(v) if isinstance(v, tuple) else v for v in cut.values()), 1)
    assert len(sampler.samples) == shards
    assert sum(sample.out.numel() for sample in sampler.samples) == 48 * 80
    for sample in sampler.samples:
        assert sample.kind == LIBRARY
        assert judge.difference(sample.out, judge.expected(sample)) is None
        assert flipped(sample) is not None


@pytest.mark.parametrize("segments", ((64,), (32, 32), (16, 48)))
def test_partial_sums_are_judged(sampler, segments):
    a, b = operands()
    total = cpu.partials(a, b, 4, segments)
    assert len(sampler.samples) == len(total) == (2 if segments == (64,) else 4)
    for number, sample in enumerate(sampler.samples):
        assert same_bits(sample.out[0], total[number])
        assert judge.difference(sample.out, judge.expected(sample)) is None
        assert flipped(sample) is not None


@pytest.mark.parametrize("nodes, shards", ((4, 4), (2, 4), (1, 4), (2, 8)))
def test_nodes_of_a_tree_are_sums_of_neighbours(nodes, shards):
    """As numerics/gemm/contraction.py leaves them on a GPU."""
    a, b = operands(16, 64, 16)
    segments = (32, 32)
    terms = []
    for first, second in every_part(segments, shards):
        term = torch.empty(16, 16)
        defined.compute(a[:, first], b[first], term, False)
        defined.compute(a[:, second], b[second], term, True)
        terms.append(term)
    while len(terms) > nodes:
        terms = [first + second for first, second in zip(terms[::2], terms[1::2], strict=True)]
    sample = Sample(DEFINED, a, b, None, torch.stack(terms), shards, segments, Where(0, 0, False))
    assert judge.difference(sample.out, judge.expected(sample)) is None
    if nodes > 1:  # the control: other neighbours
        wrong = Sample(DEFINED, a, b, None, sample.out.flip(0).contiguous(), shards, segments, Where(0, 0, False))
        assert judge.difference(wrong.out, judge.expected(wrong)) is not None


def test_bits_are_counted_and_a_nan_is_a_nan():
    single = torch.tensor([1.0, 2.0, float("nan"), -0.0])
    other = single.clone()
    assert judge.difference(single, other) is None
    other.view(torch.int32)[2] ^= 1
    assert judge.difference(single, other) is None
    other.view(torch.int32)[0] ^= 0b101
    other[3] = 0.0
    assert judge.difference(single, other) == judge.UnlikeBits(2, 4, 3)
