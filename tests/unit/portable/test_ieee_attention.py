"""Attention in stated arithmetic: the compiled form against its definition in numpy, and against fp64."""

import functools

import numpy as np
import pytest
import torch

from tests.definitions.elementwise import folded, numpy_version
from tests.definitions.tensor_core_sum import bf16_product
from tests.operands import same_bits, threads
from tp_invariant_recipes.kernels.cpu import tensor_core_cpu
from tp_invariant_recipes.portable.ieee.attention import attention_backward, attention_forward
from tp_invariant_recipes.portable.ieee.attention_triton import LANES

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
