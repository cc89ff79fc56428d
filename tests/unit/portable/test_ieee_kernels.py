# SPDX-License-Identifier: Apache-2.0
"""The portable kernels on a CPU against their definitions in numpy, an operation at a time; every bit is compared.

Each control computes a definition in another way that is usual elsewhere: with an FMA, or in another order.

The portable router and an expert's activation on a CPU against their definitions in numpy; every bit is compared.

The controls compute a definition in another way that is usual elsewhere."""

import numpy as np
import pytest
import torch

from tests.definitions.elementwise import folded, numpy_version
from tests.definitions.tensor_core_sum import fma
from tests.operands import KINDS, same_bits, sample, threads
from tp_invariant_recipes.kernels.cpu import numba_loop, tensor_core_cpu
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu
from tp_invariant_recipes.portable.ieee.math import power_of_two
from tp_invariant_recipes.portable.mode import REPLACEMENTS
from tp_invariant_recipes.portable.shared_source import SMALL

DTYPES = (torch.bfloat16, torch.float32)
UNIT = np.float32(1)


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def wide(x):
    return x.float().numpy()


def rounded(values, dtype):
    """fp32 numbers of numpy as a tensor of this dtype, every NaN canonical."""
    if dtype == torch.bfloat16:
        bits = numpy_version("bf16_bits")(values).astype(np.uint32).astype(np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(dtype)
    return torch.from_numpy(numpy_version("canonical")(values))


def in_lanes(rows, lanes):
    """The sum of [..., n] over n in lanes (ieee_sums.py)."""
    size = rows.shape[-1]
    rows = np.concatenate([rows, np.zeros((*rows.shape[:-1], -size % lanes), np.float32)], -1)
    total = np.zeros((*rows.shape[:-1], lanes), np.float32)
    for start in range(0, size, lanes):
        total = total + rows[..., start : start + lanes]
    return folded(total)


def in_sequence(rows):
    total = np.zeros(rows.shape[:-1], np.float32)
    for i in range(rows.shape[-1]):
        total = total + rows[..., i]
    return total


# --- RMSNorm ---

SHAPES = ((24, 1, 96, 4, False), (16, 8, 24, 2, True), (8, 1, 5000, 2, False), (512, 1, 260, 1, False))


def norm_forward(x, weight, eps, dtype, add=folded):
    scale = numpy_version("rsqrt")(add(x * x) / np.float32(x.shape[-1]) + np.float32(eps))[..., None]
    return rounded((x * scale) * weight, dtype), rounded(scale, torch.float32)


def norm_backward(dy, x, weight, scale, shards, by_heads, dtype, minus_product=None):
    normal, dnormal = x * scale, dy * weight
    along = (folded(dnormal * normal) / np.float32(x.shape[-1]))[..., None]
    inner = minus_product(normal, along, dnormal) if minus_product else dnormal - normal * along
    products = dy * normal
    tokens, heads, width = x.shape
    if by_heads:
        products = products.reshape(tokens, shards, heads // shards, width).transpose(1, 0, 2, 3)
    products = products.reshape(shards, -1, width)
    leaves = 1
    while leaves < 64 and products.shape[1] % (2 * leaves) == 0 and products.shape[1] // leaves * width >= 2 * 4096:
        leaves *= 2
    products = products.reshape(shards, leaves, -1, width)
    lanes = min(max(1, 4096 // power_of_two(width)), power_of_two(products.shape[2]))
    sums = in_lanes(np.moveaxis(products, 2, -1), lanes)
    return rounded(inner * scale, dtype), rounded(sums, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, heads, width, shards, by_heads", SHAPES)
def test_norm(tokens, heads, width, shards, by_heads, dtype, kind):
    x = sample(kind, tokens, heads, 2 * width, dtype=dtype)[..., :width]  # with gaps
    dy, weight = sample(kind, tokens, heads, width, dtype=dtype, seed=1), sample("normal", width, dtype=dtype, seed=2)
    y, scale = ieee_norm.rms_norm_forward(x, weight, 1e-6)
    expected = norm_forward(wide(x), wide(weight), 1e-6, dtype)
    assert same_bits(y, expected[0])
    assert same_bits(scale, expected[1])
    results = ieee_norm.rms_norm_backward(dy, x, weight, scale, shards, by_heads)
    numbers = (wide(dy), wide(x), wide(weight), scale.numpy(), shards, by_heads)
    for mine, reference in zip(results, norm_backward(*numbers, dtype), strict=True):
        assert same_bits(mine, reference)


def test_norm_controls():
    x, dy, weight = sample("wide", 24, 1, 96), sample("wide", 24, 1, 96, seed=1), sample("normal", 96, seed=2)
    y, scale = ieee_norm.rms_norm_forward(x, weight, 1e-6)
    assert not same_bits(y, norm_forward(wide(x), wide(weight), 1e-6, torch.float32, in_sequence)[0])
    dx, _ = ieee_norm.rms_norm_backward(dy, x, weight, scale, 4, False)
    fused = norm_backward(wide(dy), wide(x), wide(weight), scale.numpy(), 4, False, torch.float32,
                          lambda normal, along, dnormal: fma(-normal, along, dnormal))  # fmt: skip
    assert not same_bits(dx, fused[0])


def test_shards_of_a_norm_do_not_depend_on_their_neighbours():
    x, dy, weight = sample("wide", 64, 8, 96), sample("wide", 64, 8, 96, seed=1), sample("normal", 96, seed=2)
    for by_heads, dim in ((False, 0), (True, 1)):
        _, scale = ieee_norm.rms_norm_forward(x, weight, 1e-6)
        _, whole = ieee_norm.rms_norm_backward(dy, x, weight, scale, 4, by_heads)
        parts = zip(dy.chunk(4, dim), x.chunk(4, dim), scale.chunk(4, dim), strict=True)
        alone = [ieee_norm.rms_norm_backward(a, b, weight, c.contiguous(), 1, by_heads)[1] for a, b, c in parts]
        assert same_bits(whole, torch.cat(alone))


# --- rotary positions ---


@pytest.mark.parametrize("factor, original, fast, slow", ((40.0, 4096, 32.0, 1.0), (16.0, 512, 8.0, 2.0)))
def test_yarn_has_megatrons_angles(factor, original, fast, slow, monkeypatch):
    """Up to fp32's rounding; the control is another factor."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    numbers = {"original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
    theirs = YarnRotaryEmbedding(64, rotary_base=5e4, scaling_factor=factor, use_cpu_initialization=True, **numbers)
    angles = theirs.get_emb(48)[0][:, 0, 0, :32]
    for mine, equal in ((factor, True), (factor + 1, False)):
        cos, sin = ieee_rotary.tables(48, 64, 5e4, ieee_rotary.Yarn(mine, original, fast, slow))
        assert torch.allclose(cos, angles.cos(), atol=1e-5) == equal
        assert torch.allclose(sin, angles.sin(), atol=1e-5) == equal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (32, 44), ids=("all of it", "a part"))
def test_rotary(width, dtype, kind):
    x = sample(kind, 10, 2, 3, width, dtype=dtype)
    cos, sin = ieee_rotary.tables(16, 32, 1e6)
    values, c, s = wide(x), cos[:10, None, None].numpy(), sin[:10, None, None].numpy()
    a, b, rest = values[..., :16], values[..., 16:32], values[..., 32:]
    for backward, sign in ((False, UNIT), (True, -UNIT)):
        expected = np.concatenate([a * c - b * (sign * s), b * c + a * (sign * s), rest], -1)
        assert same_bits(ieee_rotary.rotate(x, cos, sin, backward), rounded(expected, dtype))


def test_rotary_control():
    x = sample("normal", 10, 2, 3, 32)
    cos, sin = ieee_rotary.tables(16, 32, 1e6)
    values, c, s = wide(x), cos[:10, None, None].numpy(), sin[:10, None, None].numpy()
    fused = rounded(fma(values[..., :16], c, -(values[..., 16:] * s)), torch.float32)
    assert not same_bits(ieee_rotary.rotate(x, cos, sin)[..., :16].contiguous(), fused)


def test_tables_of_positions():
    cos, sin = ieee_rotary.tables(2048, 64, 1e6)
    angles = torch.outer(torch.arange(2048).double(), 1e6 ** (-torch.arange(0, 64, 2).double() / 64))
    torch.testing.assert_close(cos, angles.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, angles.sin().float(), rtol=0, atol=1e-7)
    # Megatron rounds frequencies and angles to fp32.
    megatrons = torch.outer(torch.arange(2048).float(), 1.0 / 1e6 ** (torch.arange(0, 64, 2).float() / 64))
    assert not same_bits(cos, megatrons.cos())


# --- cross entropy ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary, shards", ((1000, 4), (9000, 2), (64, 8)))
def test_cross_entropy(vocabulary, shards, dtype, kind):
    logits = sample(kind, 6, vocabulary, dtype=dtype)
    highest = logits.amax(-1).float().nan_to_num(nan=np.inf) + 0.0
    values = numpy_version("exp")(wide(logits) - highest.numpy()[:, None])
    size = vocabulary // shards
    sums = in_lanes(values.reshape(6, shards, size), min(4096, power_of_two(size)))
    result = ieee_cross_entropy.sum_of_exponentials(logits, highest, shards)
    assert same_bits(result, rounded(np.ascontiguousarray(sums.T), torch.float32))
    total, index = result.sum(0), torch.tensor([0, 1, vocabulary - 1, -1, vocabulary, 5])
    gradient = sample("normal", 6, seed=1)
    softmax = values / total.numpy()[:, None] - (np.arange(vocabulary) == index.numpy()[:, None]).astype(np.float32)
    expected = rounded(softmax * gradient.numpy()[:, None], dtype)
    assert same_bits(ieee_cross_entropy.softmax_gradient(logits, index, highest, total, gradient, shards), expected)
    logarithm = ieee_cross_entropy.logarithm(total)
    assert same_bits(logarithm, rounded(numpy_version("log")(total.numpy()), torch.float32))


def test_cross_entropy_control():
    logits = sample("normal", 6, 1000)
    highest = logits.amax(-1)
    result = ieee_cross_entropy.sum_of_exponentials(logits, highest, 4)
    difference = wide(logits) - highest.numpy()[:, None]
    in_order = in_sequence(numpy_version("exp")(difference).reshape(6, 4, 250))
    assert not same_bits(result, rounded(np.ascontiguousarray(in_order.T), torch.float32))
    other_lanes = in_lanes(numpy_version("exp")(difference).reshape(6, 4, 250), 64)
    assert not same_bits(result, rounded(np.ascontiguousarray(other_lanes.T), torch.float32))


# --- Adam ---


def adam(tensors, numbers, decoupled, add_product=lambda x, y, z: z + x * y):
    p, g, m, v = (tensor.numpy() for tensor in tensors)
    n = ieee_adam.AdamNumbers(*(np.float32(number) for number in numbers))
    g = g if decoupled else g + p * n.decay
    m, v = add_product(m, n.beta1, g * n.rest1), v * n.beta2 + (g * n.rest2) * g
    update = (m / n.correction1) / (np.sqrt(v / n.correction2) + n.eps)
    update = update + p * n.decay if decoupled else update
    return [rounded(x, torch.float32) for x in (p - update * n.lr, m, v)]


def adam_tensors(kind, size=3000):
    p, g, m, v = (sample(kind, size, seed=seed) for seed in range(4))
    return [p, g * 0.01, m * 0.01, v.square() * 1e-4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", (True, False), ids=("AdamW", "Adam"))
@pytest.mark.parametrize("step", (1, 7, 100_000))
def test_adam(step, decoupled, kind):
    tensors = adam_tensors(kind)
    numbers = ieee_adam.adam_numbers(step, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    expected = adam(tensors, numbers, decoupled)
    ieee_adam.adam_step(*tensors, numbers, decoupled)
    for result, reference in zip((tensors[0], *tensors[2:]), expected, strict=True):
        assert same_bits(result, reference)


def test_adam_is_adam_and_no_fma():
    tensors = adam_tensors("normal")
    mine = [tensor.clone() for tensor in tensors]
    numbers = ieee_adam.adam_numbers(7, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    ieee_adam.adam_step(*mine, numbers)
    fused = adam(tensors, numbers, True, lambda x, y, z: fma(x, y, z))
    assert not same_bits(mine[2], fused[1])
    p, g, m, v = (tensor.double() for tensor in tensors)
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    update = m / (1 - 0.9**7) / ((v / (1 - 0.95**7)).sqrt() + 1e-8) + 0.1 * p
    torch.testing.assert_close(mine[0].double(), p - 1e-3 * update, rtol=1e-6, atol=1e-7)


def test_a_clipped_gradient_is_an_ieee_product_of_subnormal_numbers_too():
    clip_grads = "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl"
    (function,) = (row.make(None) for row in REPLACEMENTS if row.target == clip_grads)
    gradient = torch.tensor([3 * 2.0**-149, 2.0**-126, -1e-38, 0.7])
    expected = torch.from_numpy(gradient.numpy() * np.float32(0.37))
    function(65536, torch.zeros(1, dtype=torch.int), [[gradient], [gradient]], 0.37)
    assert same_bits(gradient, expected)
    assert gradient.all()


def test_adams_numbers():
    numbers = ieee_adam.adam_numbers(3, 0.1, (0.5, 0.75), 1e-8, 0.0)
    assert (numbers.correction1, numbers.correction2) == (1 - 0.125, 1 - 0.421875)
    assert numbers.lr == np.float32(0.1)
    assert ieee_adam.power(0.999, 1000) == pytest.approx(0.999**1000)
    with pytest.raises(ValueError, match="first step of Adam is 1"):
        ieee_adam.adam_numbers(0, 0.1, (0.5, 0.75), 1e-8, 0.0)


@pytest.mark.parametrize("wrong", (torch.zeros(4, 4).t(), torch.zeros(4, 4, dtype=torch.bfloat16)), ids=("t", "bf16"))
def test_adam_refuses_what_it_cannot_step(wrong):
    others = [torch.zeros(4, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="must be fp32 and contiguous"):
        ieee_adam.adam_step(wrong, *others, ieee_adam.adam_numbers(1, 0.1, (0.9, 0.9), 1e-8, 0.0))


# --- threads ---


def everything():
    x, dy, weight = (sample("wide", *shape, seed=3) for shape in ((260, 1, 192), (260, 1, 192), (192,)))
    y, scale = ieee_norm.rms_norm_forward(x, weight, 1e-6)
    yield from (y, scale, *ieee_norm.rms_norm_backward(dy, x, weight, scale, 4, False))
    rows = sample("normal", 260, 384)
    dy, p = sample("normal", 260, 192, seed=1), sample("normal", 260, seed=2)
    yield from (ieee_swiglu.swiglu(rows), ieee_swiglu.swiglu_backward(dy, rows)[0])
    yield from ieee_swiglu.swiglu_backward(dy, rows, p)
    probs, scores, chosen = ieee_router.route_tokens(rows, 8)
    yield from (scores, ieee_router.route_tokens_backward(probs, scores, rows, chosen))
    yield ieee_rotary.rotate(rows.view(65, 4, 12, 32), *ieee_rotary.tables(65, 32, 1e4))
    highest, index = rows.amax(-1), torch.zeros(260, dtype=torch.int64)
    total = ieee_cross_entropy.sum_of_exponentials(rows, highest, 4)
    yield from (total, ieee_cross_entropy.softmax_gradient(rows, index, highest, total[0], total[1], 4))
    tensors = adam_tensors("normal", 2 * SMALL)
    ieee_adam.adam_step(*tensors, ieee_adam.adam_numbers(2, 1e-3, (0.9, 0.95), 1e-8, 0.1))
    yield from tensors


def test_threads_do_not_change_a_bit():
    assert SMALL < 260 * 192
    result = []
    for count in (1, 2, 3):
        with threads(count):
            result.append(list(everything()))
    for first, *others in zip(*result, strict=True):
        assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize(
    "loop, source",
    (
        *((ieee_swiglu._forward_loop, f"portable/{name}.py") for name in ("shared_source", "ieee/math")),
        *(
            (loop, f"kernels/{name}.py")
            for loop in (ieee_swiglu._forward_loop, tensor_core_cpu._add_bf16)
            for name in ("gemm/segmented_k_gemm", "cpu/numba_loop")
        ),
    ),
)
def test_a_kept_loop_follows_all_sources(monkeypatch, loop, source):
    """Also the files of the functions and constants in it; numba itself would keep the old ones."""

    def stamp():
        return numba_loop.cpu_loop(loop.py_func)._cache._cache_file._source_stamp

    before = stamp()
    assert stamp() == before
    read = numba_loop.Path.read_bytes
    numba_loop._stamp_of_sources.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(
                numba_loop.Path, "read_bytes", lambda path: read(path) + b" " * path.as_posix().endswith(source)
            )
            assert stamp() != before
    finally:
        numba_loop._stamp_of_sources.cache_clear()
    assert stamp() == before


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about special numbers


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
