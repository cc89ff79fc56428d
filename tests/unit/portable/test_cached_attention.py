"""Attention to cached keys: a row has the bits of the whole pass, wherever its keys lie; another order has others."""

import random

import pytest
import torch

from tests.operands import same_bits
from tests.unit.portable.test_ieee_attention import attention_operands
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.portable.ieee.attention import attention_forward
from tp_invariant_recipes.portable.ieee.cached_attention import Spans, cached_attention, rows_of_tile, store_keys

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
