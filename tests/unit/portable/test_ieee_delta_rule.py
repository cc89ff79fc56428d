# SPDX-License-Identifier: Apache-2.0
"""The portable delta rule and the router of sigmoid scores on a CPU against their definitions, bit by bit."""

import numpy as np
import pytest
import torch

from tests.definitions.elementwise import folded, numpy_version
from tests.operands import same_bits, sample
from tp_invariant_recipes.portable.cached_pass import CachedPass, Recurrent
from tp_invariant_recipes.portable.delta_net import _Past
from tp_invariant_recipes.portable.ieee.cached_attention import Spans
from tp_invariant_recipes.portable.ieee.delta_rule import Numbers, delta_rule, delta_rule_backward
from tp_invariant_recipes.portable.ieee.router import route_by_sigmoid

HEADS, KEY, VALUE = 2, 12, 5


def numbers(rows, seed=0):
    q, k, v = (
        sample("normal", rows, HEADS, width, seed=seed + n) * scale
        for n, (width, scale) in enumerate(((KEY, 0.3), (KEY, 0.3), (VALUE, 1.0)))
    )
    decay, strength = (torch.sigmoid(sample("normal", rows, HEADS, seed=seed + n)) for n in (3, 4))
    return Numbers(q, k, v, decay, strength)


def spans(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def whole(given, step=1):
    states = torch.full((step, HEADS, VALUE, KEY), torch.nan)
    count = len(given.v) // step
    return delta_rule(given, spans(*((n, count, n, 1) for n in range(step))), step, states)


def padded(x):
    return folded(np.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, 16 - KEY))))


def test_each_operation_rounds_once():
    given, state, out = numbers(9), np.zeros((HEADS, VALUE, KEY), np.float32), []
    for q, k, v, a, b in zip(*(x.numpy() for x in given), strict=True):
        m = a[:, None, None] * state
        d = b[:, None] * (v - padded(m * k[:, None]))
        state = m + d[..., None] * k[:, None]
        out.append(padded(state * q[:, None]))
    assert same_bits(whole(given), torch.from_numpy(np.stack(out)))


def test_a_sequence_in_parts_beside_others_has_the_bits_of_the_whole():
    """The control keeps a state in bf16 between two parts."""
    given, other = numbers(10), numbers(4, seed=9)
    expected = whole(given)
    for cut in (1, 3, 9):
        for rounds in (False, True):
            states = torch.full((3, HEADS, VALUE, KEY), torch.nan)
            first = Numbers(*(torch.cat([y, x[:cut]]) for x, y in zip(given, other, strict=True)))
            start = delta_rule(first, spans((4, cut, 2, 1), (0, 0, 0, 0), (0, 4, 1, 1)), 1, states)
            states = states.bfloat16().float() if rounds else states
            rest = delta_rule(Numbers(*(x[cut:] for x in given)), spans((0, 10 - cut, 2, 0)), 1, states)
            assert same_bits(start[:4], whole(other))
            assert same_bits(torch.cat([start[4:], rest]), expected) != rounds


def naive(q, k, v, a, b):
    state, out = v.new_zeros(HEADS, VALUE, KEY), []
    for t in range(len(v)):
        state = a[t, :, None, None] * state
        d = b[t, :, None] * (v[t] - (state * k[t, :, None]).sum(-1))
        state = state + d[..., None] * k[t, :, None]
        out.append((state * q[t, :, None]).sum(-1))
    return torch.stack(out)


def test_gradients_are_those_of_the_recurrence():
    """Of the rule, to what fp32 rounds away; over two segments. A sequence has the same bits beside another one."""
    given, gradient = numbers(70), sample("normal", 70, HEADS, VALUE, seed=7)
    result = delta_rule_backward(gradient, given)
    leaves = [x.double().requires_grad_() for x in given]
    expected = torch.autograd.grad(naive(*leaves), leaves, gradient.double())
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)
    both = delta_rule_backward(torch.cat([gradient] * 2, 1), Numbers(*(torch.cat([x] * 2, 1) for x in given)))
    assert all(same_bits(x[:, HEADS:].contiguous(), y) for x, y in zip(both, result, strict=True))


def sigmoid(x):
    return numpy_version("sigmoid")(x)


@pytest.mark.parametrize("groups", (None, (4, 2)))
def test_experts_are_chosen_by_sigmoid_scores(groups):
    logits = sample("normal", 20, 16)
    logits[:, 8:] = logits[:, :8]
    bias = torch.arange(16).float().flip(0) / 64
    probs, scores, chosen = route_by_sigmoid(logits, 4, bias, groups, 2.5)
    c = sigmoid(logits.numpy())
    ranks = c + bias.numpy()
    if groups:
        best = -np.sort(-ranks.reshape(20, 4, 4), -1)
        sums = best[..., 0] + best[..., 1]
        first = np.argsort(-sums, -1, kind="stable")[:, :2]
        ranks = np.where(np.repeat([[n in row for n in range(4)] for row in first], 4, 1), ranks, -np.inf)
    expected = np.zeros((20, 16), bool)
    np.put_along_axis(expected, np.argsort(-ranks, -1, kind="stable")[:, :4], True, -1)
    assert (chosen.numpy() == expected).all()
    picked = np.where(expected, c, np.float32(0))
    tiny = np.float32(1e-20)
    assert same_bits(probs, torch.from_numpy(picked / (folded(picked)[:, None] + tiny) * np.float32(2.5)))
    assert same_bits(scores, torch.from_numpy(c / (folded(c)[:, None] + tiny)))


def test_gradients_of_sigmoid_scores():
    logits = sample("normal", 6, 8).requires_grad_()
    probs, *_ = route_by_sigmoid(logits, 3, None, None, 2.5)
    weights = sample("normal", 6, 8, seed=3)
    (mine,) = torch.autograd.grad(probs, logits, weights)
    wide = logits.detach().double().requires_grad_()
    picked = torch.where(probs > 0, wide.sigmoid(), 0.0)
    (theirs,) = torch.autograd.grad(picked / picked.sum(1, keepdim=True) * 2.5, wide, weights.double())
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", ((1, 1, 1, 7), (2, 8), (9, 1), (10,)))
def test_a_convolution_in_parts_reads_the_tokens_before_them(cuts):
    """Beside another sequence, whose state is the one before; a sequence begins with zeros, whatever was there."""
    x, other, channels = sample("normal", 10, 6).bfloat16(), sample("normal", 3, 6, seed=1).bfloat16(), 6
    tails = torch.full((1, 4, 3, channels), torch.nan, dtype=torch.bfloat16)
    expected, start = _Past.apply(x.float(), 1), 0
    for count in cuts:
        rows = torch.tensor([(1, n) for n in range(3)] + [(2, n) for n in range(count)])
        of_spans = spans((0, 3, 1, 1), (3, count, 2, start == 0), (0, 0, 0, 0))
        positions = torch.tensor([0, 1, 2, *range(start, start + count)])
        recurrent = Recurrent(of_spans, rows, torch.empty(0), tails)
        now = CachedPass(Spans(of_spans, positions, 64, 7), positions, x, x, 16, (0,), recurrent)
        taps = now.past(1, torch.cat([other, x[start : start + count]]))
        for mine, whole_one, beside in zip(taps, expected, _Past.apply(other.float(), 1), strict=True):
            assert same_bits(mine[3:], whole_one[start : start + count].contiguous())
            assert same_bits(mine[:3], beside.contiguous())
        start += count
