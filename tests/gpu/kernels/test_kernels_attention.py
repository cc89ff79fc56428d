"""The portable attention on a GPU: the bits of its form for a CPU."""

import numpy as np
import pytest

from tests.operands import same_bits
from tests.unit.portable import test_cached_attention
from tests.unit.portable.attention_interpreted import KINDS, NAMES, finite_operands
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.portable.ieee.attention import attention_backward, attention_forward
from tp_invariant_recipes.portable.ieee.cached_attention import cached_attention, rows_of_tile

pytestmark = pytest.mark.gpu
SHAPES = ((5, 2, 4, 2, 16), (130, 1, 3, 1, 20), (200, 2, 8, 2, 64), (1000, 1, 4, 2, 128), (256, 1, 2, 2, 256))


def attention(tensors, scale, device):
    query, key, value, gradient = (x.to(device) for x in tensors)
    attended = attention_forward(query, key, value, scale)
    return [x.cpu() for x in (*attended, *attention_backward(gradient, query, key, value, attended, scale))]


def different(shape, kind):
    tensors, scale = finite_operands(*shape, kind), float(np.float32(shape[-1] ** -0.5))
    both = zip(NAMES, attention(tensors, scale, "cpu"), attention(tensors, scale, "cuda"), strict=True)
    return [name for name, here, there in both if not same_bits(here, there)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_a_cpu(shape, kind):
    assert different(shape, kind) == []


def test_it_repeats_its_bits_and_no_head_depends_on_another():
    tensors = [x.cuda() for x in finite_operands(300, 1, 4, 2, 64, "cancelling")]
    whole = attention(tensors, 0.125, "cuda")
    assert all(same_bits(x, y) for x, y in zip(whole, attention(tensors, 0.125, "cuda"), strict=True))
    half = [x[:, :, : x.shape[2] // 2] for x in tensors]
    alone = attention(half, 0.125, "cuda")
    for name, x, y in zip(NAMES, whole, alone, strict=True):
        x = x[: y.shape[0]] if name in ("top", "inverse") else x[:, :, : y.shape[2]]
        assert same_bits(x.contiguous(), y), name


def test_one_kept_bit_less_differs(monkeypatch):
    monkeypatch.setattr(tensor_core_cpu, "KEPT_BITS", tensor_core_cpu.KEPT_BITS - 1)
    assert different(SHAPES[2], "wide")


CHUNKS = ((1, 1, 1, 1), (1, 7, 70, 130), (1, 64, 3, 65))


@pytest.mark.parametrize("heads, groups, d", ((4, 2, 24), (16, 8, 128), (5, 1, 64), (32, 1, 16)))
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("size", (1, 16, 64, 256))
def test_rows_of_cached_keys_have_the_bits_of_a_cpu(heads, groups, d, chunks, size):
    sequences = test_cached_attention.operands(heads, groups, d)
    most = rows_of_tile(heads // groups, max(chunks))
    query, keys, values, spans, _ = test_cached_attention.laid_out(sequences, size, chunks, longest=most)
    here = cached_attention(query, keys, values, spans, 0.25)
    there = spans._replace(tables=spans.tables.cuda(), positions=spans.positions.cuda())
    result = cached_attention(query.cuda(), keys.cuda(), values.cuda(), there, 0.25).cpu()
    assert same_bits(result, here)


def test_cached_keys_in_another_order_have_other_bits():
    sequences = test_cached_attention.operands(lengths=(128,))
    query, keys, values, spans, _ = test_cached_attention.laid_out(sequences, 64, (1,))
    there = spans._replace(tables=spans.tables[:, [0, 1, 3, 2]].cuda(), positions=spans.positions.cuda())
    result = cached_attention(query.cuda(), keys.cuda(), values.cuda(), there, 0.25).cpu()
    assert not same_bits(result, cached_attention(query, keys, values, spans, 0.25))
