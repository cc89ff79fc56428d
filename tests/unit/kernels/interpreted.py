"""The Triton kernels on CPU tensors: a process that Triton's interpreter runs in, which it decides at its import.

    TRITON_INTERPRET=1 python -m tests.unit.kernels.interpreted KERNEL…

runs each of these kernels in a fork of its own, and prints one line of JSON: what went wrong with each, or null.
The interpreter rounds fp32 as IEEE 754 says, so what a kernel adds, and in which order, shows. It does not know bf16's
rounding.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction
from itertools import product
from unittest.mock import Mock, patch

import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.operands import KINDS, same_bits, sample
from tests.unit.kernels import fp8_interpreted, test_delta_rule
from tests.unit.kernels.products import test_mxfp8
from tests.unit.kernels.products.test_fixed_tile_product import RAGGED, layouts, operands
from tests.unit.numerics.layers.test_mamba_kernels import STEP, conv_inputs, norm_inputs, slices
from tests.unit.numerics.sums.test_grad_norm import kernel_cases
from tests.unit.portable import attention_interpreted, test_draw
from tp_invariant_recipes.kernels import (
    causal_conv,
    centred_rows,
    delta_rule,
    digest,
    grad_norm,
    group_norm,
    peer_add,
    rms_norm,
    row_add,
    row_sum,
    swiglu,
    token_sum,
    tree_add,
    weighted_activation,
)
from tp_invariant_recipes.kernels.products import fixed_tile_product, grouped_product, mxfp8
from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.kernels.products.quantized import E4M3, E5M2
from tp_invariant_recipes.kernels.tensor_part import TensorPart
from tp_invariant_recipes.numerics.layers import delta_net
from tp_invariant_recipes.numerics.sums import peer_memory
from tp_invariant_recipes.portable import definition
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import draw as ieee_draw
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import samples as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu
from tp_invariant_recipes.portable.shared_source import fill

# Each takes a third of the interpreter's time: looking for overflows in all sums of indices, which are small here, and
# replacing Triton's language anew for each call of a function.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
_patch_lang, _patched = interpreter._patch_lang, set()


def _patched_once(fn):
    languages = frozenset(name for name, value in fn.__globals__.items() if value is tl or value is tl.core)
    if languages not in _patched:
        _patch_lang(fn)
        _patched.add(languages)
    return interpreter._LangPatchScope()  # with nothing to restore


interpreter._patch_lang = _patched_once

DTYPES = (torch.bfloat16, torch.float32)
FEW = ("wide", "special")  # kinds of operands: the interpreter is slow


def _alike(function, *operands):
    """Assert that a function of the package gives CPU tensors the bits that its kernel gives them."""
    twin = function(*operands)
    with patch.object(torch.Tensor, "is_cuda", True):
        result = function(*operands)
    results, twins = (item if isinstance(item, tuple) else (item,) for item in (result, twin))
    assert all(map(same_bits, results, twins)), [part.shape for part in operands if isinstance(part, torch.Tensor)]


def tree_add_has_the_bits_of_its_twin():
    for width in (1, 2, 4, 8, 16, 32, 64):
        # A part of a block beside whole ones: a block has 1024 elements, of more than 8 partials 128.
        for groups, size in ((2, 1040 if width <= 8 else 150), (3, 5)):
            _alike(tree_add.tree_add, torch.randn(groups, width, size), torch.zeros(groups, size), groups)


def peers_are_added_in_the_order_of_the_tree():
    for width in (2, 4, 8):
        for size in (1, 5000, 3 * peer_add.BLOCK):  # blocks, and a part of one
            partials = [torch.randn(size) * 2.0 ** torch.randint(-20, 20, (size,)) for _ in range(width)]
            whole, out = torch.stack(partials)[None], torch.empty(size)
            twin = tree_add._tree_add_torch(whole, torch.empty(1, size), 1)[0]
            assert same_bits(peer_add.peer_add(partials, out), twin), width
            turned = peer_add.peer_add(partials[1:] + partials[:1], torch.empty(size))
            assert width == 2 or size == 1 or not same_bits(turned, twin), width


def sums_through_memory_are_slices_of_the_tree():
    """Ranks of one process, in step: their buffers are ordinary memory, and no barrier is needed."""
    for size in (2, 4, 8):
        shape = tokens, features = 2 * size, 24
        nodes = torch.randn(size, *shape) * 2.0 ** torch.randint(-20, 20, shape)
        whole = tree_add.tree_add(nodes, torch.empty(shape))
        memory = [torch.empty(tokens * features) for _ in range(size)]
        ranks = [_rank(rank, memory) for rank in range(size)]
        sums = [rank.begin_sum(shape) for rank in ranks]
        assert all(rank.begin_sum(shape) is None for rank in ranks)  # one at a time
        for started, node in zip(sums, nodes, strict=True):
            for peer in started.peers.order():
                started.send(peer, node[started.rows(peer)])
        assert same_bits(torch.cat([started.finished(torch.float32) for started in sums]), whole), size
        assert ranks[0].begin_sum((tokens + 1, features)) is None
        _COPIES.clear()
        slices = [torch.randn(3, 5) for _ in range(size)]
        gathers = [rank.start_gather(part) for rank, part in zip(ranks, slices, strict=True)]
        for gather in gathers[::-1]:
            gather.wait()
            assert same_bits(gather.whole, torch.cat(slices))
        assert ranks[0].start_gather(slices[0]) is not None


def _rank(rank, memory):
    peers = object.__new__(peer_memory.Peers)
    peers.rank, peers.size, peers.device = rank, len(memory), torch.device("cpu")
    peers.copy = lambda to, part: _COPIES.append((to, part))
    peers.copied = lambda: None
    peers.wait = lambda event: [to.copy_(part) for to, part in _COPIES]  # all ranks', as late as they may arrive
    for name in ("sums", "gathers"):
        buffer = object.__new__(peer_memory.Buffer)
        buffer.busy, buffer.handle = False, Mock()
        buffer._views = _Views(memory)
        setattr(peers, name, buffer)
    return peers


_COPIES = []  # of a process of its own


class _Views(dict):
    """Views of the ranks' memory, of any size."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def get(self, kind):
        return [buffer[: kind[0]] for buffer in self.memory]


def norms_are_correct_and_slices_of_each_other():
    cases = ((32, 1, 96, False), (16, 8, 24, True), (16, 8, 64, True), (8, 1, 5000, False))
    for tokens, heads, width, by_heads in cases:
        shards = 4
        x = torch.randn(tokens, heads, 2 * width)[..., :width]
        dy, weight = torch.randn(tokens, heads, width), torch.randn(width)
        y, scale = rms_norm._forward_triton(x, weight, 1e-6)
        dx, leaves = rms_norm._backward_triton(dy, x, weight, scale, shards, by_heads)
        y2, scale2 = rms_norm._forward_torch(x, weight, 1e-6)
        dx2, leaves2 = rms_norm._backward_torch(dy, x, weight, scale2, shards, by_heads)
        torch.testing.assert_close(y, y2)
        torch.testing.assert_close(dx, dx2)
        torch.testing.assert_close(leaves.sum(1), leaves2.sum(1), rtol=1e-4, atol=1e-4)
        dim = 1 if by_heads else 0
        for degree in (2, 4):
            parts = []
            for rank in range(degree):
                mine, expected = x.chunk(degree, dim)[rank], dy.chunk(degree, dim)[rank]
                part, s = rms_norm._forward_triton(mine, weight, 1e-6)
                parts.append((part, *rms_norm._backward_triton(expected, mine, weight, s, shards // degree, by_heads)))
            for whole, pieces, along in zip((y, dx, leaves), zip(*parts, strict=True), (dim, dim, 0), strict=True):
                assert same_bits(whole, torch.cat(pieces, along)), (tokens, heads, width, degree)


def rows_lose_their_own_mean():
    for width in (96, 100, 5000):
        memory = torch.randn(1 + 7 * width)
        for x in (memory[:-1].view(7, width), memory[1:].view(7, width)):  # and where no 16 bytes begin
            y, twin = (f(x, torch.empty(x.shape)) for f in (centred_rows._centred_triton, centred_rows._centred_torch))
            torch.testing.assert_close(y, twin)
            torch.testing.assert_close(y, (x.double() - x.double().mean(1, keepdim=True)).float())
            alone = centred_rows._centred_triton(x[2:5], torch.empty(3, width))
            assert same_bits(alone, y[2:5].contiguous()), width


def token_sums_are_correct_and_slices_of_each_other():
    values = torch.randn(24, 320)  # leaves of several tokens, two blocks of features
    whole, chunks = token_sum._token_sum_triton(values, 1), token_sum._token_sum_triton(values, 4)
    torch.testing.assert_close(whole.sum(1), values.sum(0, keepdim=True))
    for tokens, shards in ((24, 4), (3, 1), (130, 1)):
        few = torch.cat([values] * 11)[:tokens]  # fp32: bf16 numbers this few add exactly in any order
        _alike(token_sum.token_sum, few, shards)
    for degree in (2, 4):
        columns = [token_sum._token_sum_triton(part.contiguous(), 1) for part in values.chunk(degree, 1)]
        assert same_bits(whole, torch.cat(columns, 2))
        rows = [token_sum._token_sum_triton(part, 4 // degree) for part in values.chunk(degree)]
        assert same_bits(chunks, torch.cat(rows))


def digest_lanes_are_those_of_numpy():
    digest.ROWS, digest.COLUMNS = 8, 32
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        size = torch.empty((), dtype=dtype).element_size()
        pieces = []
        for rows, columns, step in ((1, 1, 1), (9, 33, 2), (17, 70, 3), (0, 8, 1)):
            noise = torch.randint(0, 256, (rows * columns * size,), dtype=torch.uint8)
            pieces.append(digest._as_words(TensorPart(noise.view(dtype).view(rows, columns), 5, 7, step)))
        table = [digest._row(n, piece) for n, piece in enumerate(pieces)]
        out, most = torch.zeros(len(pieces), 2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        keys = digest.keys(digest._length(pieces), cpu)
        digest.launch(digest.programs(table, cpu), keys, out, pieces[0].values.element_size(), most)
        assert torch.equal(out, torch.stack([digest._lanes_numpy(piece) for piece in pieces])), dtype
        if dtype in digest.WITH_MAGNITUDE:
            assert most == grad_norm.largest([piece.values.view(dtype) for piece in pieces])


def digests_find_copies_that_do_not_follow():
    """Among ties, NaNs, infinities and subnormals, in either loop of the kernel."""
    digest.ROWS, digest.COLUMNS = 8, 32
    cpu = torch.device("cpu")
    pieces, wrong = [], []
    for rows, columns in ((1, 1), (9, 33), (21, 100)):
        noise = torch.randint(0, 256, (rows * columns * 4,), dtype=torch.uint8).view(torch.int32)
        noise[::3] = noise[::3] & ~0xFFFF | 0x8000  # half-way between two bf16 numbers
        noise[::5] = noise[::5] & ~0x7F800000 | torch.tensor([0, 0x7F800000])[torch.randint(0, 2, noise[::5].shape)]
        values = noise.view(torch.float32).view(rows, columns)
        copy = torch.empty(rows, columns + 3, dtype=torch.bfloat16)[:, :columns]
        copy.copy_(values)
        number = min(rows * columns, 7)
        for at in torch.randperm(rows * columns)[:number].tolist():
            row, column = divmod(at, columns)
            if values[row, column].isnan():
                copy[row, column] = 1.0
            else:
                copy.view(torch.int16)[row, column] ^= 1
                if copy[row, column].isnan():
                    copy[row, column] = 1.0
        wrong.append(number)
        pieces.append(digest._as_words(TensorPart(values, 0, 0, 1, copy)))
    out, unlike = torch.zeros(len(pieces), 2, dtype=torch.int64), torch.zeros(len(pieces), dtype=torch.int64)
    table = [digest._row(n, piece) for n, piece in enumerate(pieces)]
    keys = digest.keys(digest._length(pieces), cpu)
    digest.launch(digest.programs(table, cpu), keys, out, 4, None, unlike)
    assert unlike.tolist() == wrong == [digest._unlike(piece) for piece in pieces]
    assert torch.equal(out, torch.stack([digest._lanes_numpy(piece) for piece in pieces]))


def experts_products_are_correct_whoever_lies_beside():
    sizes, n, k = (130, 0, 1, 7), 72, 80
    memory = torch.randn(2 * len(sizes), n, k)
    weights = [memory[i] for i in (5, 0, 3, 6)]
    x, dy = torch.randn(sum(sizes), k), torch.randn(sum(sizes), n)

    def all_of(x, dy, weights, sizes):
        groups = grouped_product.Groups(sizes, torch.tensor(sizes))
        y, dx = torch.full((len(x), n), 7.0), torch.full_like(x, 7.0)
        grouped_product.grouped_product(x, weights, y, groups, transposed=True)
        grouped_product.grouped_product(dy, weights, dx, groups, transposed=False)
        outs = [torch.ones(n, k) for _ in sizes]
        grouped_product.grouped_weight_gradient(dy, x, outs, groups)
        return y, dx, outs

    y, dx, outs = all_of(x, dy, weights, sizes)
    at = 0
    for size, weight, out in zip(sizes, weights, outs, strict=True):
        rows = slice(at, at + size)
        torch.testing.assert_close(y[rows], x[rows] @ weight.t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dx[rows], dy[rows] @ weight, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out, 1 + dy[rows].t() @ x[rows], rtol=1e-4, atol=1e-4)
        alone = all_of(x[rows].contiguous(), dy[rows].contiguous(), [weight.clone()], (size,))
        assert same_bits(alone[0], y[rows])
        assert same_bits(alone[1], dx[rows])
        assert same_bits(alone[2][0], out)
        ended = (torch.cat([part[rows], torch.zeros(45, part.shape[1])]) for part in (x, dy))  # by rows of zeros
        assert same_bits(all_of(*ended, [weight.clone()], (size + 45,))[2][0], out)
        at += size
    captured = torch.full_like(y, 7.0)
    grouped_product.grouped_product(
        x, weights, captured, grouped_product.Groups((), torch.tensor(sizes), sum(sizes)), transposed=True
    )
    assert same_bits(captured, y)
    chained = [torch.randn(n, k) for _ in range(2)]
    expected = [out.clone() for out in chained]
    zeros = [torch.zeros(n, k) for _ in sizes]
    groups = grouped_product.Groups(sizes, torch.tensor(sizes))
    grouped_product.grouped_weight_gradient(dy, x, zeros, groups)
    for number, out in enumerate(expected):
        for link in (1, 0):
            out += zeros[2 * number + link]
    grouped_product.grouped_weight_gradient(dy, x, chained, groups, (1, 0))
    assert all(map(same_bits, chained, expected))


def row_sums_have_the_bits_of_their_twin():
    for features in (40, 1500):
        _alike(row_sum.row_sum, torch.randn(9, features), torch.randint(-1, 9, (13, 3)))


def rows_are_added_as_their_twin_adds_them():
    def added(rows, at, out, at_once):
        row_add.add_rows(rows, at, out := out.clone(), at_once)
        return out

    for features, most in ((40, 3), (1500, 12), (8, 1)):
        operands = torch.randn(24, features), torch.randint(-2, most, (24,)), torch.randn(most, features)
        for at_once in (False, True):
            _alike(added, *operands, at_once)
        assert not same_bits(added(*operands, False), added(*operands, True)), (features, most)


def activations_are_correct_row_by_row():
    clamped = weighted_activation.Clamped(1.702, 0.7, 1.0), weighted_activation.Clamped(1.0, float("inf"), 0.5)
    for kind, width in (("swiglu", 400), ("squared_relu", 200), *((kind, 400) for kind in clamped)):
        x, p, dy = torch.randn(11, width), torch.rand(11), torch.randn(11, 200)
        y, twin = weighted_activation._forward_triton(x, p, kind), weighted_activation._forward_torch(x, p, kind)
        torch.testing.assert_close(y, twin)
        both = weighted_activation._backward_triton(dy, x, p, kind), weighted_activation._backward_torch(dy, x, p, kind)
        for mine, other in zip(*both, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        for row in range(11):
            single = slice(row, row + 1)
            assert same_bits(weighted_activation._forward_triton(x[single], p[single], kind), y[single])
            alone = weighted_activation._backward_triton(dy[single], x[single], p[single], kind)
            assert all(same_bits(a, b[single]) for a, b in zip(alone, both[0], strict=True))


def swiglu_is_correct_number_by_number():
    x, dy = torch.randn(3, 2 * 1100), torch.randn(3, 1100)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(dy.double())
    y, dx = swiglu.swiglu(x), swiglu.swiglu_backward(dy, x)
    torch.testing.assert_close(y, expected.float())
    torch.testing.assert_close(dx, wide.grad.float())
    columns = [*range(7, 30), *range(1100 + 7, 1100 + 30)]
    assert same_bits(swiglu.swiglu(x[2:3, columns].contiguous()), y[2:3, 7:30])
    assert same_bits(swiglu.swiglu_backward(dy[2:3, 7:30].contiguous(), x[2:3, columns].contiguous()), dx[2:3, columns])


def gradient_norms_have_the_bits_of_plain_torch():
    grad_norm.CHUNK = 6 * grad_norm.SQUARES_BLOCK  # four blocks at once, and two alone
    for grads in kernel_cases(grad_norm.CHUNK + 100):
        table = grad_norm._table(grad_norm._spans(grads), torch.device("cpu"))
        largest, limbs = torch.zeros((), dtype=torch.int64), torch.zeros(grad_norm.LIMBS, dtype=torch.int64)
        grad_norm.launch_largest(table, largest)
        grad_norm.launch_square_limbs(table, largest, limbs)
        assert torch.equal(largest, grad_norm.largest(grads)), grads
        assert torch.equal(limbs, grad_norm.square_limbs(grads, largest)), grads


def fixed_tile_products_are_correct():
    """The interpreter cannot multiply bf16, so the tile of bf16 multiplies fp32 here."""
    tiles = fixed_tile_product.TILES
    for tile in list(tiles.values()):
        tiles[torch.float32] = tile
        for shape in RAGGED:
            a, b = operands(*shape, torch.float32)
            expected = a.double() @ b.double()
            there = torch.randn(expected.shape)
            for x, y, out, add in zip(layouts(a), layouts(b), layouts(there), (False, True, True), strict=True):
                before = out.double() * add
                fixed_tile_product.launch(x, y, out, add)
                torch.testing.assert_close(out.double(), before + expected, rtol=1e-5, atol=2e-5)


def _near(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def _convolved(x, dy, weight, bias):
    y = causal_conv._forward_triton(x, weight, bias, STEP)
    return (y, *causal_conv._backward_triton(dy, x, weight, bias, STEP))


def mambas_convolution_is_correct_and_slices_of_each_other():
    causal_conv.CHANNELS = 16  # several blocks of them
    x, dy, weight, bias = inputs = tuple(tensor[:2] for tensor in conv_inputs())
    whole = _convolved(*inputs)
    _near(whole[0], causal_conv._forward_torch(x, weight, bias, STEP))
    dx, sums = causal_conv._backward_torch(dy, x, weight, bias, STEP)
    _near(whole[1], dx)
    _near(whole[2].sum(1), sums.sum(1))
    assert whole[2].shape[1] > 1
    parts = [_convolved(*part) for part in slices(inputs, 2)]
    assert all(same_bits(item, torch.cat(pieces)) for item, pieces in zip(whole, zip(*parts, strict=True), strict=True))


def _normed(x, dy, weight):
    y, scale = group_norm._forward_triton(x, weight, 1e-5)
    return (y, scale, *group_norm._backward_triton(dy, x, weight, scale))


def mambas_norm_is_correct_and_slices_of_each_other():
    group_norm.TILE = 512  # several tiles a leaf, several leaves
    x, dy, weight = (tensor[:2] for tensor in norm_inputs())
    whole = _normed(x, dy, weight)
    y, scale = group_norm._forward_torch(x, weight, 1e-5)
    dx, sums = group_norm._backward_torch(dy, x, weight, scale)
    for result, expected in zip(whole[:3], (y, scale, dx), strict=True):
        _near(result, expected)
    _near(whole[3].sum(1), sums.sum(1))
    assert whole[3].shape[1] > 1
    parts = [_normed(*part) for part in slices((x, dy, weight), 2)]
    assert all(same_bits(item, torch.cat(pieces)) for item, pieces in zip(whole, zip(*parts, strict=True), strict=True))


def the_gated_delta_rule_is_correct_shard_by_shard():
    """In the second chunk there are eight tokens; two heads share a group, whose features are fewer than a tile's."""
    sizes = delta_rule.Heads(groups=1, heads=2, key=20, value=12)
    inputs = test_delta_rule.operands(delta_rule.CHUNK + 8, sizes, shards=2, batch=1)
    exact = test_delta_rule.both(test_delta_rule.token_by_token, inputs, torch.float64, sizes)

    def of_part(*shards):
        mine = [item[[*shards]] for item in inputs]
        y = delta_net.with_kernels(sizes, *mine)
        return [y, *delta_net.gradients_with_kernels(sizes, test_delta_rule.gradient_of(y), *mine)]

    whole = of_part(0, 1)
    assert max(errors := test_delta_rule.errors(whole, exact)) < 1e-5, errors
    assert all(same_bits(a[1:], b) for a, b in zip(whole, of_part(1), strict=True))


def samples_of_a_gated_delta_net_are_computed_as_if_alone():
    """The convolution and the rule; sequences end within a chunk."""
    sizes = delta_rule.Heads(groups=1, heads=2, key=20, value=12)
    inputs = test_delta_rule.operands(delta_rule.CHUNK + 8, sizes, shards=1, batch=2)
    x, *more = inputs[:3]
    weight, bias = torch.randn(1, x.shape[-1], causal_conv.TAPS), torch.randn(1, x.shape[-1])

    def of_part(*samples):
        mine, alpha, beta = (item[:, :, [*samples]] for item in (x, *more))
        mixed = causal_conv._forward_triton(mine.flatten(1, 2), weight, bias, len(samples)).view(mine.shape)
        return mixed, delta_net.with_kernels(sizes, mixed, alpha, beta, *inputs[3:])

    whole = of_part(0, 1)
    for n in range(2):
        assert all(same_bits(a[:, :, [n]], b) for a, b in zip(whole, of_part(n), strict=True)), n
    assert not same_bits(whole[1][:, :, [0]], whole[1][:, :, [1]])  # the control


def portable_norms_have_the_bits_of_their_twin():
    shapes = ((24, 1, 96, 4, False), (16, 8, 24, 2, True), (6, 1, 5000, 2, False))
    for (tokens, heads, width, *shards), kind, dtype in product(shapes, FEW, DTYPES):
        x, dy = (sample(kind, tokens, heads, width, dtype=dtype, seed=seed) for seed in (0, 1))
        weight = sample("normal", width, dtype=dtype, seed=2)
        _alike(ieee_norm.rms_norm_forward, x, weight, 1e-6)
        _alike(ieee_norm.rms_norm_backward, dy, x, weight, ieee_norm.rms_norm_forward(x, weight, 1e-6)[1], *shards)


def portable_swiglu_has_the_bits_of_its_twin():
    for kind, dtype in zip(FEW, DTYPES, strict=True):
        x, dy = sample(kind, 2, 2 * 1100, dtype=dtype), sample(kind, 2, 1100, dtype=dtype, seed=1)
        _alike(ieee_swiglu.swiglu, x)
        _alike(lambda *operands: ieee_swiglu.swiglu_backward(*operands)[0], dy, x)


def portable_rotary_has_the_bits_of_its_twin():
    tables = ieee_rotary.tables(16, 32, 1e6)
    for kind, dtype, width in product(KINDS, DTYPES, (32, 44)):
        _alike(ieee_rotary.rotate, sample(kind, 10, 2, 30, width, dtype=dtype), *tables)


def portable_cross_entropy_has_the_bits_of_its_twin():
    for kind, dtype, (vocabulary, shards) in product(FEW, DTYPES, ((300, 2), (5000, 1))):
        logits, gradient = sample(kind, 3, vocabulary, dtype=dtype), sample("normal", 3, seed=1)
        highest = logits.amax(-1).float().nan_to_num(nan=torch.inf)
        _alike(ieee_cross_entropy.sum_of_exponentials, logits, highest, shards)
        total = ieee_cross_entropy.sum_of_exponentials(logits, highest, shards)[0]
        index = torch.tensor([vocabulary - 1, -1, 5])
        _alike(ieee_cross_entropy.softmax_gradient, logits, index, highest, total, gradient, shards)
        _alike(ieee_cross_entropy.logarithm, total)


def portable_adam_has_the_bits_of_its_twin():
    numbers = ieee_adam.adam_numbers(5, 1e-3, (0.9, 0.95), 1e-8, 0.1)

    def stepped(decoupled, *tensors):
        tensors = tuple(tensor.clone() for tensor in tensors)
        ieee_adam.adam_step(*([tensor] for tensor in tensors), numbers, decoupled)
        return tensors

    for kind, decoupled in product(KINDS, (True, False)):
        _alike(stepped, decoupled, *(sample(kind, 2500, seed=seed) for seed in range(4)))


def portable_routers_have_the_bits_of_their_twin():
    for kind, dtype, (experts, topk) in (("normal", torch.bfloat16, (8, 2)), ("wide", torch.float32, (100, 8))):
        logits = sample(kind, 5, experts, dtype=dtype)
        logits[0], logits[1, ::2] = 1.5, 0.25
        dp, ds = sample(kind, 5, experts, dtype=dtype, seed=1), sample(kind, 5, experts, seed=2)
        _alike(ieee_router.route_tokens, logits, topk)
        _alike(ieee_router.route_tokens_backward, dp, ds, logits, ieee_router.route_tokens(logits, topk)[2])


def portable_experts_have_the_bits_of_their_twin():
    for kind, dtype, width in (("wide", torch.bfloat16, 70), ("special", torch.float32, 1100)):
        x, dy = sample(kind, 3, 2 * width, dtype=dtype), sample(kind, 3, width, dtype=dtype, seed=1)
        p = sample("normal", 3, dtype=dtype, seed=2)
        _alike(ieee_swiglu.swiglu, x, p)
        _alike(ieee_swiglu.swiglu_backward, dy, x, p)


def portable_functions_have_the_bits_of_their_twin():
    interpreter.InterpreterBuilder.create_fma = attention_interpreted.fused
    _alike(ieee_samples.values, torch.from_numpy(definition.samples().copy()))


def portable_draws_have_the_bits_of_their_twin():
    """Of a group of words and a part of one; the greatest of several programs."""
    scores, keys, numbers = test_draw.inputs(8, 4200, "ties")
    highest, do_sample, temperature = scores.amax(-1), numbers[:, 0].int(), numbers[:, 1].float()
    limits = ieee_draw.kept(scores, highest, numbers)
    _alike(ieee_draw.race, scores, highest, do_sample, temperature, keys, limits)

    def weights(*operands):
        fill(ieee_draw.weights_triton, ieee_draw._weights_loop, (*operands, out := torch.empty_like(scores)), work=1)
        return out

    _alike(weights, scores, highest, temperature)


def portable_attention_has_the_bits_of_its_twin():
    """Tiles with a part beyond the end, four heads a group; with fewer bits, others."""
    assert attention_interpreted.differing_from_twin(25, 70, 1, 4, 1, 24, "opposite") == []
    assert attention_interpreted.differing_from_twin(20, 17, 1, 2, 1, 16, "opposite")


def portable_attention_to_cached_keys_has_the_bits_of_its_twin():
    """Tiles of one row and of several; blocks that are smaller than a tile, and larger; with fewer bits, others."""
    assert attention_interpreted.cached_rows_are_their_twins(25, 16, (1, 1, 1, 1), 4, 2, 24)
    assert attention_interpreted.cached_rows_are_their_twins(25, 128, (1, 9, 70, 65), 3, 1, 16)
    assert not attention_interpreted.cached_rows_are_their_twins(20, 64, (1, 1, 9, 1), 4, 2, 16)


def portable_attention_of_more_shapes_has_the_bits_of_its_twin():
    for shape, kind in product(((5, 2, 4, 2, 16), (130, 1, 3, 1, 20), (128, 1, 2, 2, 64)), attention_interpreted.KINDS):
        assert attention_interpreted.differing_from_twin(25, *shape, kind) == [], (shape, kind)


def fp8_products_have_the_bits_of_the_definition():
    """With fewer bits of a tensor core, others."""
    assert fp8_interpreted.all_differing() == []
    assert fp8_interpreted.differing(12, "1x128", (E4M3, E4M3), 5, 9, 128)


def mxfp8_has_the_bits_of_its_twin():
    sizes = (40, 0, 3, 32)
    forms = (E4M3, True, True, Groups(sizes, torch.tensor(sizes))), (E5M2, True, False, None), (E4M3, False, True, None)
    kinds = ("wide", "small", "large", "bits", "ends", "bits")
    for kind, (dtype, rows, columns, groups) in zip(kinds, forms * 2, strict=True):
        x = test_mxfp8.operand(kind, rows=75 if groups else 64, k=160)
        _alike(mxfp8.sides, x, dtype, rows, columns, groups)
    memory = test_mxfp8.operand("wide", rows=200, k=160)
    for starts in ((8, 0, 96), (1, 100, 37)):  # rows of 320 bytes; those of the second are in no order
        weights = [memory[start : start + 64] for start in starts]
        for rows in (True, False):
            _alike(lambda rows, weights=weights: tuple(mxfp8.of_weights(weights, rows=rows)), rows)


KERNELS: dict[str, Callable[[], None]] = {
    name: function
    for name, function in [*globals().items()]
    if isfunction(function) and function.__module__ == __name__ and name[0] != "_"
}


def _in_a_fork(function: Callable[[], None]) -> str | None:
    """What went wrong with a function, which leaves nothing behind here; null: nothing."""
    with tempfile.TemporaryFile("w+") as message:
        pid = os.fork()
        if pid == 0:
            try:
                torch.manual_seed(0)
                function()
                status = 0
            except BaseException:
                traceback.print_exc(file=message)
                message.flush()
                status = 1
            os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        message.seek(0)
        return None if ended == 0 else f"{message.read()}ended with {ended}"


if __name__ == "__main__":
    print(json.dumps({name: _in_a_fork(KERNELS[name]) for name in sys.argv[1:]}))
