"""The portable kernels on a GPU: the bits of their twins on a CPU."""

import pytest
import torch

from tests.operands import KINDS, any_bits, same_bits, sample
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import samples as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("kind", KINDS),
]
DTYPES = (torch.bfloat16, torch.float32)


def on_both(function, *arguments):
    """The results of a function of tensors on a CPU and on a GPU, compared bit by bit."""
    there = function(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments))
    here = function(*arguments)
    for first, other in zip(here, there, strict=True):
        assert same_bits(first, other.cpu())
    return here


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tokens, heads, width, by_heads", ((256, 1, 1000, False), (56, 1, 5000, False), (256, 16, 128, True))
)
def test_norm(tokens, heads, width, by_heads, dtype, kind):
    x, dy = (sample(kind, tokens, heads, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = sample("normal", width, dtype=dtype, seed=2)
    _, scale = on_both(ieee_norm.rms_norm_forward, x, weight, 1e-6)
    on_both(ieee_norm.rms_norm_backward, dy, x, weight, scale, 8, by_heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_rotary(dtype, kind):
    x, dy = sample(kind, 300, 2 * 3000, dtype=dtype), sample(kind, 300, 3000, dtype=dtype, seed=1)
    on_both(lambda a, b: (ieee_swiglu.swiglu(a), ieee_swiglu.swiglu_backward(b, a)[0]), x, dy)
    heads = sample(kind, 300, 2, 4, 128, dtype=dtype)
    on_both(lambda a, c, s: (ieee_rotary.rotate(a, c, s),), heads, *ieee_rotary.tables(300, 96, 1e6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype, kind):
    logits, gradient = sample(kind, 64, 18992 * 2, dtype=dtype), sample("normal", 64, seed=1)
    highest, index = logits.amax(-1).float().nan_to_num(nan=torch.inf), torch.arange(64)
    (sums,) = on_both(lambda a, b: (ieee_cross_entropy.sum_of_exponentials(a, b, 2),), logits, highest)
    on_both(lambda a: (ieee_cross_entropy.logarithm(a),), sums)
    arguments = (logits, index, highest, sums[0], gradient)
    on_both(lambda *tensors: (ieee_cross_entropy.softmax_gradient(*tensors, 2),), *arguments)


@pytest.mark.parametrize("decoupled", (True, False))
def test_adam(decoupled, kind):
    def step(*tensors):
        changed = [tensor.clone() for tensor in tensors]
        numbers = ieee_adam.adam_numbers(5, 1e-3, (0.9, 0.95), 1e-8, 0.1)
        ieee_adam.adam_step(*([tensor] for tensor in changed), numbers, decoupled)
        return changed

    on_both(step, *(sample(kind, 100_001, seed=seed) for seed in range(4)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts, topk", ((8, 2), (128, 8)))
def test_router(experts, topk, dtype, kind):
    finite = "normal" if kind == "special" else kind
    logits, dp = sample(finite, 300, experts, dtype=dtype), sample(kind, 300, experts, dtype=dtype, seed=1)
    logits[0], logits[1, ::2] = 1.5, 0.25
    _, scores, chosen = on_both(ieee_router.route_tokens, logits, topk)
    on_both(lambda *tensors: (ieee_router.route_tokens_backward(*tensors),), dp, scores, logits, chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (768, 3000))
def test_expert(width, dtype, kind):
    x, dy = sample(kind, 300, 2 * width, dtype=dtype), sample(kind, 300, width, dtype=dtype, seed=1)
    p = sample("normal", 300, dtype=dtype, seed=2)
    on_both(lambda a, b: (ieee_swiglu.swiglu(a, b),), x, p)
    on_both(ieee_swiglu.swiglu_backward, dy, x, p)


def test_functions(kind):
    x = torch.from_numpy(any_bits(100_000, KINDS.index(kind)))
    on_both(lambda numbers: (ieee_samples.values(numbers),), x)
