"""The portable router and an expert's activation on a CPU against their definitions in numpy; every bit is compared.

The controls compute a definition in another way that is usual elsewhere.
"""

import numpy as np
import pytest
import torch

from tests.definitions.elementwise import folded, numpy_version
from tests.definitions.tensor_core_sum import fma
from tests.operands import KINDS, same_bits, sample
from tests.unit.portable.test_ieee_kernels import in_lanes, in_sequence, rounded, wide
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about special numbers
DTYPES = (torch.bfloat16, torch.float32)
UNIT = np.float32(1)
FINITE = tuple(kind for kind in KINDS if kind != "special")


def first_of(logits, topk):
    """The chosen, [tokens, experts]: by logit downwards, of equal ones by number upwards."""
    order = np.argsort(-wide(logits), axis=-1, kind="stable")[:, :topk]
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, order, True, -1)
    return chosen


def softmaxes(logits, chosen, add=folded):
    numbers = wide(logits)
    every = numpy_version("exp")(numbers - numbers.max(-1, keepdims=True))
    part = np.where(chosen, every, np.float32(0))
    return part / add(part)[:, None], every / add(every)[:, None]


def slopes(p, dp, s, ds, dtype, add=folded):
    return rounded(p * (dp - add(p * dp)[:, None]) + s * (ds - add(s * ds)[:, None]), dtype)


def tied(kind, tokens, experts, dtype):
    """Logits of which many are equal."""
    logits = sample(kind, tokens, experts, dtype=dtype)
    logits[:, experts // 2 :] = logits[:, : experts - experts // 2].flip(-1)
    logits[0] = 1.5
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    return logits


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts, topk", ((8, 2), (128, 8), (5, 5), (7, 1)))
def test_router(experts, topk, dtype, kind):
    logits = tied(kind, 40, experts, dtype)
    probs, scores, chosen = ieee_router.route_tokens(logits, topk)
    expected = first_of(logits, topk)
    assert (chosen.numpy() == expected).all()
    assert (expected.sum(-1) == topk).all()
    p, s = softmaxes(logits, expected)
    assert same_bits(probs, rounded(p, dtype))
    assert same_bits(scores, torch.from_numpy(s))
    dp, ds = sample(kind, 40, experts, dtype=dtype, seed=1), sample(kind, 40, experts, seed=2)
    result = ieee_router.route_tokens_backward(dp, ds, logits, chosen)
    assert same_bits(result, slopes(p, wide(dp), s, ds.numpy(), dtype))


def test_of_equal_logits_the_lower_number_is_chosen():
    """The control: torch.topk may choose others."""
    _, _, chosen = ieee_router.route_tokens(torch.ones(1, 64), 3)
    assert chosen[0].nonzero().flatten().tolist() == [0, 1, 2]
    zeros = torch.tensor([[-0.0, 0.0, -1.0, 0.0]])
    assert ieee_router.route_tokens(zeros, 2)[2].tolist() == [[True, True, False, False]]


def test_router_controls():
    logits = tied("normal", 40, 128, torch.float32)
    probs, scores, chosen = ieee_router.route_tokens(logits, 8)
    p, s = softmaxes(logits, chosen.numpy(), in_sequence)
    assert not same_bits(scores, torch.from_numpy(s))
    assert not same_bits(scores, torch.softmax(logits, -1))
    p, s = softmaxes(logits, chosen.numpy())
    dp, ds = sample("wide", 40, 128, seed=1), sample("wide", 40, 128, seed=2)
    result = ieee_router.route_tokens_backward(dp, ds, logits, chosen)
    assert not same_bits(result, slopes(p, dp.numpy(), s, ds.numpy(), torch.float32, in_sequence))
    last = chosen.flip(-1)
    assert not same_bits(probs, rounded(softmaxes(logits, last.numpy())[0], torch.float32))


def test_a_tokens_route_does_not_depend_on_its_neighbours():
    logits = tied("normal", 40, 16, torch.bfloat16)
    whole = ieee_router.route_tokens(logits, 4)
    for alone, all_of_them in zip(ieee_router.route_tokens(logits[7:9], 4), whole, strict=True):
        assert torch.equal(alone, all_of_them[7:9])


def activation(x):
    """up, the sigmoid of gate, and gate times that."""
    gate, up = np.split(wide(x), 2, -1)
    c = numpy_version("sigmoid")(gate)
    return up, c, gate * c


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (333, 1500))
def test_swiglu_of_an_expert_and_of_a_dense_layer(width, dtype, kind):
    x, dy = sample(kind, 9, 2 * width, dtype=dtype), sample(kind, 9, width, dtype=dtype, seed=1)
    p = sample("normal", 9, dtype=dtype, seed=2).abs()
    up, c, s = activation(x)
    weight = wide(p)[:, None]
    assert same_bits(ieee_swiglu.swiglu(x), rounded(s * up, dtype))
    assert same_bits(ieee_swiglu.swiglu(x, p), rounded((s * up) * weight, dtype))
    dx, dp = ieee_swiglu.swiglu_backward(dy, x, p)
    for result, dy_of_unit in ((ieee_swiglu.swiglu_backward(dy, x)[0], wide(dy)), (dx, wide(dy) * weight)):
        expected = np.concatenate([(dy_of_unit * up) * (c + s * (UNIT - c)), dy_of_unit * s], -1)
        assert same_bits(result, rounded(expected, dtype))
    assert same_bits(dp, rounded(in_lanes(wide(dy) * (s * up), min(1024, 1 << (width - 1).bit_length())), dtype))


def test_swiglu_controls():
    x, dy, p = sample("normal", 9, 2 * 333), sample("normal", 9, 333, seed=1), sample("normal", 9, seed=2).abs()
    up, c, s = activation(x)
    gate = wide(x)[:, :333]
    assert not same_bits(ieee_swiglu.swiglu(x, p), rounded(s * (up * wide(p)[:, None]), torch.float32))
    assert not same_bits(ieee_swiglu.swiglu(x), rounded((gate / (UNIT + np.exp(-gate))) * up, torch.float32))
    dgate = ieee_swiglu.swiglu_backward(dy, x)[0][:, :333].contiguous()
    assert not same_bits(dgate, rounded((wide(dy) * up) * fma(s, UNIT - c, c), torch.float32))
    _, dp = ieee_swiglu.swiglu_backward(dy, x, p)
    assert not same_bits(dp, rounded(in_sequence(dy.numpy() * (s * up)), torch.float32))


def test_an_expert_without_tokens():
    x, p = torch.empty(0, 64).bfloat16(), torch.empty(0).bfloat16()
    assert ieee_swiglu.swiglu(x, p).shape == (0, 32)
    dx, dp = ieee_swiglu.swiglu_backward(torch.empty(0, 32).bfloat16(), x, p)
    assert (dx.shape, dp.shape) == ((0, 64), (0,))
