# SPDX-License-Identifier: Apache-2.0
"""Attention in stated arithmetic: the compiled form against its definition in numpy, and against fp64. Attention to
cached keys: a row has the bits of the whole pass, wherever its keys lie; another order has others.
"""

import functools
import random

import numpy as np
import pytest
import torch

from tests.definitions.elementwise import folded, numpy_version
from tests.definitions.tensor_core_sum import bf16_product
from tests.operands import same_bits, threads
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.portable.ieee.attention import attention_backward, attention_forward
from tp_invariant_recipes.portable.ieee.attention_triton import LANES
from tp_invariant_recipes.portable.ieee.cached_attention import Spans, cached_attention, rows_of_tile, store_keys

EXPONENTIAL, EXP2, ROUND = (numpy_version(name) for name in ("exponential", "exp2", "bf16_bits"))
SHAPES = ((5, 1, 2, 1, 16), (70, 2, 4, 2, 24), (64, 1, 1, 1, 32), (130, 1, 3, 3, 16))  # s, b, heads, groups, d


def attention_operands(s, b, h, g, d, size=1.0):
    generator = torch.Generator().manual_seed(s)
    shapes = (s, b, h, d), (s, b, g, d), (s, b, g, d), (s, b, h, d)
    return [(size * torch.randn(*shape, generator=generator)).bfloat16() for shape in shapes]


def cancelling_operands(*shape, **size):
    """Eight heads of a group: three, the same with the opposite gradient, and two whose gradient is 2^-12 as large.

    Sums over heads then consist of the two and of what adding the others rounds off, which depends on the order.
    """
    query, key, value, gradient = attention_operands(*shape, **size)
    query[:, :, 3:6], gradient[:, :, 3:6] = query[:, :, :3], -gradient[:, :, :3]
    gradient[:, :, 6:] *= 2.0**-12
    return query, key, value, gradient


def words_of(x):
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def exact_bf16_product(a, b):
    return bf16_product(a, b).view(np.float32)


def to_bf16(x):
    return ROUND(x).astype(np.uint16)


def widened_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def added_in_lanes(rows):
    """[n, m] → [n]."""
    count = -(-rows.shape[1] // LANES)
    rows = np.pad(rows, ((0, 0), (0, count * LANES - rows.shape[1]))).reshape(rows.shape[0], count, LANES)
    total = np.zeros((rows.shape[0], LANES), np.float32)
    for part in range(count):
        total = total + rows[:, part]
    return folded(total)


def defined(q, k, v, do, scale):
    """Output and gradients of one sample and group by the definition: bits; q, do: lists of heads, [s, d] each."""
    scale, c = np.float32(scale), np.float32(scale * np.log2(np.e))
    after = np.triu(np.ones((len(k), len(k)), bool), 1)
    outs, inverses, dqs, dks, dvs = [], [], [], [], []
    for query, gradient in zip(q, do, strict=True):
        s = exact_bf16_product(query, k.T)
        top = np.where(after, -np.inf, s).max(1, keepdims=True).astype(np.float32) * c
        e = np.where(after, np.float32(0), EXPONENTIAL(s, c, top))
        inverse = np.float32(1) / added_in_lanes(e)[:, None]
        out = to_bf16(exact_bf16_product(to_bf16(e), v) * inverse)
        along = folded(widened_bits(gradient) * widened_bits(out))[:, None]
        p = e * inverse
        ds = np.where(after, 0, to_bf16((exact_bf16_product(gradient, v.T) - along) * p)).astype(np.uint16)
        outs.append(out)
        inverses.append(inverse[:, 0])
        dqs.append(to_bf16(exact_bf16_product(ds, k) * scale))
        dks.append(exact_bf16_product(ds.T, query))
        dvs.append(exact_bf16_product(to_bf16(p).T, gradient))
    return outs, inverses, dqs, to_bf16(of_heads(dks) * scale), to_bf16(of_heads(dvs))


def of_heads(parts):
    """Added one after the other."""
    return functools.reduce(np.add, parts)


def differing_from_definition(shape, size, operands=attention_operands):
    """The names of the tensors that the compiled attention gives other bits than the definition."""
    _, b, h, g, d = shape
    query, key, value, gradient = operands(*shape, size=size)
    scale = d**-0.5
    attended = attention_forward(query, key, value, scale)
    grads = attention_backward(gradient, query, key, value, attended, scale)
    results = [words_of(x) for x in (attended.out, *grads)]
    per, names = h // g, set()
    q, k, v, do = map(words_of, (query, key, value, gradient))
    for sample in range(b):
        for group in range(g):
            heads = range(group * per, (group + 1) * per)
            outs, inverses, dqs, dk, dv = defined(
                [q[:, sample, head] for head in heads], k[:, sample, group], v[:, sample, group],
                [do[:, sample, head] for head in heads], scale,
            )  # fmt: skip
            pairs = [("dk", results[2][:, sample, group], dk), ("dv", results[3][:, sample, group], dv)]
            for n, head in enumerate(heads):
                pairs += [("out", results[0][:, sample, head], outs[n]), ("dq", results[1][:, sample, head], dqs[n])]
                pairs.append(("inverse", attended.inverse[sample * g + group, n].numpy(), inverses[n]))
            names |= {name for name, here, there in pairs if (here != there).any()}
    return names


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", (1.0, 12.0))
def test_the_compiled_attention_is_the_definition(shape, size):
    assert differing_from_definition(shape, size) == set()


def _last_first(parts):
    return functools.reduce(np.add, parts[::-1])


def _unfused(score, scale, top):
    return EXP2(score * scale - top)


# What another definition would change: a name of this file, its replacement, the tensors that may show it, how many
# positions it takes, and the operands.
ALL = {"inverse", "out", "dq", "dk", "dv"}
OTHERS = (
    pytest.param("EXPONENTIAL", _unfused, ALL, 130, attention_operands, id="no FMA"),
    pytest.param("added_in_lanes", folded, ALL, 300, attention_operands, id="no lanes", marks=pytest.mark.release),
    pytest.param("of_heads", _last_first, {"dk", "dv"}, 130, cancelling_operands, id="last head first"),
)


@pytest.mark.parametrize("name, other, shown, positions, operands", OTHERS)
def test_another_definition_has_other_bits(monkeypatch, name, other, shown, positions, operands):
    shape = (positions, 1, 8, 1, 16)
    assert differing_from_definition(shape, 0.3, operands) == set()
    monkeypatch.setitem(globals(), name, other)
    assert shown >= differing_from_definition(shape, 0.3, operands) != set()


def test_attention_is_attention():
    query, key, value, gradient = attention_operands(70, 2, 4, 2, 24)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    expected = expected.permute(2, 0, 1, 3)
    expected.backward(gradient.double())
    attended = attention_forward(query, key, value, 0.2)
    grads = attention_backward(gradient, query, key, value, attended, 0.2)
    for result, correct in zip((attended.out, *grads), (expected, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(result.double(), correct, rtol=0.02, atol=0.03)


def test_neither_heads_beside_nor_threads_change_a_bit():
    query, key, value, gradient = attention_operands(70, 2, 4, 2, 24)

    def outcome(heads, groups):
        parts = [x[:, :, n] for x, n in ((query, heads), (key, groups), (value, groups), (gradient, heads))]
        attended = attention_forward(*parts[:3], 0.2)
        return [attended.out, *attention_backward(parts[3], *parts[:3], attended, 0.2)]

    whole = outcome(slice(None), slice(None))
    halves = zip(outcome(slice(0, 2), slice(0, 1)), outcome(slice(2, 4), slice(1, 2)), strict=True)
    assert all(same_bits(x, torch.cat(parts, 2)) for x, parts in zip(whole, halves, strict=True))
    with threads(3):
        assert all(same_bits(x, y) for x, y in zip(whole, outcome(slice(None), slice(None)), strict=True))


@pytest.mark.parametrize("kept", (20, 24))
def test_other_arithmetic_gives_other_bits(kept, monkeypatch):
    query, key, value, gradient = attention_operands(130, 1, 3, 3, 16, 12.0)

    def outcome():
        attended = attention_forward(query, key, value, 0.25)
        return [*attended, *attention_backward(gradient, query, key, value, attended, 0.25)]

    before = outcome()
    monkeypatch.setattr(tensor_core_cpu, "KEPT_BITS", kept)
    assert not all(same_bits(x, y) for x, y in zip(before, outcome(), strict=True))


def test_other_operands_are_refused():
    query, key, value, _ = attention_operands(5, 1, 2, 1, 16)
    with pytest.raises(TypeError, match="bf16"):
        attention_forward(query.float(), key, value, 0.25)
    with pytest.raises(ValueError, match="attention of"):
        attention_forward(query, key[:4], value, 0.25)


SCALE = 0.25
LENGTHS = (1, 64, 70, 130)  # of the sequences of a pass


def laid_out(sequences, size, chunks, seed=0, longest=1 << 30):
    """Keys of sequences in shuffled blocks, and one pass over the last chunks of tokens of all sequences.

    sequences: query, key and value of each, [s, h or g, d]. returns: queries, keys, values, spans, and each row's
    sequence and position.
    """
    draw = random.Random(seed)
    counts = [-(-len(query) // size) for query, _, _ in sequences]
    numbers = draw.sample(range(1, sum(counts) + 1), sum(counts))
    _, g, d = sequences[0][1].shape
    keys, values = torch.full((2, (len(numbers) + 1) * size, g, d), 7.0).bfloat16()
    tables, positions, queries, rows = [], [], [], []
    for number, (query, key, value) in enumerate(sequences):
        blocks, numbers = numbers[: counts[number]], numbers[counts[number] :]
        at = torch.arange(len(query))
        store_keys(key, value, keys, values, torch.tensor(blocks)[at // size] * size + at % size)
        first = max(0, len(query) - chunks[number])
        for start in range(first, len(query), longest):
            count = min(longest, len(query) - start)
            tables.append([len(rows), count, *blocks, *[0] * (max(counts) - len(blocks))])
            rows += [(number, position) for position in range(start, start + count)]
        queries.append(query[first:])
        positions += range(first, len(query))
    spans = Spans(torch.tensor(tables).int(), torch.tensor(positions), size, max(table[1] for table in tables))
    return torch.cat(queries), keys, values, spans, rows


def operands(heads=4, groups=2, d=24, lengths=LENGTHS):
    """Values of many magnitudes that cancel in the sum over all keys, so that bf16 shows its order."""
    made, generator = [], torch.Generator().manual_seed(1)
    for length in lengths:
        query, key, value = (x[:, 0] for x in attention_operands(length, 1, heads, groups, d)[:3])
        value = value * 2.0 ** torch.randint(-8, 9, (length, 1, 1), generator=generator)
        half = length // 2
        value[half : 2 * half] = -value[:half].flip(0)
        made.append([0.02 * query, 0.02 * key, value.bfloat16()])
    return made


def wholes(sequences):
    return [attention_forward(*(x.unsqueeze(1) for x in sequence), SCALE).out.squeeze(1) for sequence in sequences]


@pytest.mark.parametrize("size", (1, 8, 64, 128))
@pytest.mark.parametrize("chunks", ((1, 1, 1, 1), (1, 7, 70, 129)), ids=str)
def test_rows_have_the_bits_of_the_whole_pass(size, chunks):
    sequences = operands()
    query, keys, values, spans, rows = laid_out(sequences, size, chunks)
    result, whole = cached_attention(query, keys, values, spans, SCALE), wholes(sequences)
    assert same_bits(result, torch.stack([whole[number][position] for number, position in rows]))


def test_keys_in_another_order_have_other_bits():
    """The control: the row sees all keys, so that their order alone is different."""
    sequences = operands(lengths=(128,))
    query, keys, values, spans, _ = laid_out(sequences, 64, (1,))
    expected = cached_attention(query, keys, values, spans, SCALE)
    assert same_bits(expected, wholes(sequences)[0][-1:])
    swapped = spans.tables[:, [0, 1, 3, 2]]
    assert not same_bits(cached_attention(query, keys, values, spans._replace(tables=swapped), SCALE), expected)


def test_a_library_has_other_bits():
    """The control of stock's path."""
    (query, key, value), *_ = sequences = operands(lengths=(130,))
    whole = wholes(sequences)[0][-1:]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[-1:], key, value))
    library = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)
    library = library[0].transpose(0, 1).contiguous()
    torch.testing.assert_close(library, whole, rtol=0.05, atol=0.05)
    assert not same_bits(library, whole)


def test_fewer_bits_of_a_tensor_core_are_seen(monkeypatch):
    sequences = operands()
    arguments = laid_out(sequences, 16, (1, 1, 1, 1))[:4]
    before = cached_attention(*arguments, SCALE)
    monkeypatch.setattr(tensor_core_cpu, "KEPT_BITS", 24)
    assert not same_bits(cached_attention(*arguments, SCALE), before)


def test_a_tile_has_the_heads_of_a_group():
    assert [rows_of_tile(heads, 1) for heads in (1, 2, 5, 16, 48)] == [16, 8, 3, 1, 1]
    assert [rows_of_tile(heads, 9) for heads in (1, 2, 5, 16, 48)] == [64, 32, 12, 4, 1]
