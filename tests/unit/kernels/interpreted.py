# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels on CPU tensors: a process that Triton's interpreter runs in, which it decides at its import.

    TRITON_INTERPRET=1 python -m tests.unit.kernels.interpreted KERNEL…

runs each of these kernels in a fork of its own, and prints one line of JSON: what went wrong with each, or null.
The interpreter rounds fp32 as IEEE 754 says, so what a kernel adds, and in which order, shows. It does not know bf16's
rounding.
"""

import functools
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

from tests import kernel_table
from tests import operands as operands_of
from tests.operands import same_bits
from tests.unit.kernels import fp8_interpreted, test_delta_rule
from tests.unit.kernels.gemm import test_quantize
from tests.unit.kernels.gemm.test_fixed_tile_product import RAGGED, layouts, operands
from tests.unit.numerics.sums.test_grad_norm import kernel_cases
from tests.unit.portable import attention_interpreted
from tp_invariant_recipes.kernels import (
    activations,
    causal_conv,
    delta_rule,
    digest,
    grad_norm,
    group_norm,
    row_sums,
    tree_add,
)
from tp_invariant_recipes.kernels.gemm import fixed_tile_gemm, grouped_gemm, mxfp8
from tp_invariant_recipes.kernels.gemm.quantize import E4M3
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.numerics.layers import delta_net
from tp_invariant_recipes.numerics.sums import symmetric_memory

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


def _alike(function, *operands):
    """Assert that a function of the package gives CPU tensors the bits that its kernel gives them."""
    twin = function(*operands)
    with patch.object(torch.Tensor, "is_cuda", True):
        result = function(*operands)
    results, twins = (item if isinstance(item, tuple) else (item,) for item in (result, twin))
    assert all(map(same_bits, results, twins)), [part.shape for part in operands if isinstance(part, torch.Tensor)]


def twins(name):
    """What the table has of these: a function's form for a CPU and its kernel have the same bits."""
    if name == "portable functions":
        interpreter.InterpreterBuilder.create_fma = attention_interpreted.fused
    for call in kernel_table.TWINS[name](large=False):
        _alike(*call)


def parts_are_parts_of_the_whole():
    causal_conv.CHANNELS, group_norm.TILE = 16, 512  # several blocks, several tiles a leaf
    for row in kernel_table.sliced(large=False):
        row.check((2, 4), lambda: patch.object(torch.Tensor, "is_cuda", True))


def added_rows_differ_from_rows_added_at_once():
    for function, *sums, _ in kernel_table.TWINS["row_add"](large=False):
        assert not same_bits(function(*sums, False), function(*sums, True))


def weights_anywhere_in_memory_are_rounded_as_by_their_twin():
    memory = test_quantize.operand("wide", rows=200, k=160)
    for starts in ((8, 0, 96), (1, 100, 37)):  # rows of 320 bytes; those of the second are in no order
        weights = [memory[start : start + 64] for start in starts]
        for rows in (True, False):
            _alike(lambda rows, weights=weights: tuple(mxfp8.of_weights(weights, rows=rows)), rows)


def peers_are_added_in_the_order_of_the_tree():
    for width in (2, 4, 8):
        for size in (1, 5000, 3 * tree_add.BLOCK):  # blocks, and a part of one
            partials = [torch.randn(size) * 2.0 ** torch.randint(-20, 20, (size,)) for _ in range(width)]
            whole, out = torch.stack(partials)[None], torch.empty(size)
            twin = tree_add._tree_add_torch(whole, torch.empty(1, size), 1)[0]
            assert same_bits(tree_add.peer_add(partials, out), twin), width
            turned = tree_add.peer_add(partials[1:] + partials[:1], torch.empty(size))
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
        for n, (started, node) in enumerate(zip(sums, nodes, strict=True)):
            for peer in ranks[n].order():
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
    peers = object.__new__(symmetric_memory.Peers)
    peers.rank, peers.size, peers.device = rank, len(memory), torch.device("cpu")
    peers.copy = lambda to, part: _COPIES.append((to, part))
    peers.copied = lambda: None
    peers.wait = lambda event: [to.copy_(part) for to, part in _COPIES]  # all ranks', as late as they may arrive
    for name in ("sums", "gathers"):
        buffer = object.__new__(symmetric_memory.Buffer)
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


def rows_lose_their_own_mean():
    for width in (96, 100, 5000):
        memory = torch.randn(1 + 7 * width)
        for x in (memory[:-1].view(7, width), memory[1:].view(7, width)):  # and where no 16 bytes begin
            y, twin = (f(x, torch.empty(x.shape)) for f in (row_sums._centred_triton, row_sums._centred_torch))
            torch.testing.assert_close(y, twin)
            torch.testing.assert_close(y, (x.double() - x.double().mean(1, keepdim=True)).float())
            alone = row_sums._centred_triton(x[2:5], torch.empty(3, width))
            assert same_bits(alone, y[2:5].contiguous()), width


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
        groups = grouped_gemm.Groups(sizes, torch.tensor(sizes))
        y, dx = torch.full((len(x), n), 7.0), torch.full_like(x, 7.0)
        grouped_gemm.grouped_gemm(x, weights, y, groups, transposed=True)
        grouped_gemm.grouped_gemm(dy, weights, dx, groups, transposed=False)
        outs = [torch.ones(n, k) for _ in sizes]
        grouped_gemm.grouped_weight_gradient(dy, x, outs, groups)
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
    with patch.object(grouped_gemm, "_copies_tiles", lambda *_: True):
        assert all(map(same_bits, all_of(x, dy, weights, sizes)[:2], (y, dx)))
    captured = torch.full_like(y, 7.0)
    grouped_gemm.grouped_gemm(
        x, weights, captured, grouped_gemm.Groups((), torch.tensor(sizes), sum(sizes)), transposed=True
    )
    assert same_bits(captured, y)
    chained = [torch.randn(n, k) for _ in range(2)]
    expected = [out.clone() for out in chained]
    zeros = [torch.zeros(n, k) for _ in sizes]
    groups = grouped_gemm.Groups(sizes, torch.tensor(sizes))
    grouped_gemm.grouped_weight_gradient(dy, x, zeros, groups)
    for number, out in enumerate(expected):
        for link in (1, 0):
            out += zeros[2 * number + link]
    grouped_gemm.grouped_weight_gradient(dy, x, chained, groups, (1, 0))
    assert all(map(same_bits, chained, expected))


def swiglu_is_correct_number_by_number():
    x, dy = torch.randn(3, 2 * 1100), torch.randn(3, 1100)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(dy.double())
    y, dx = activations.swiglu(x), activations.swiglu_backward(dy, x)
    torch.testing.assert_close(y, expected.float())
    torch.testing.assert_close(dx, wide.grad.float())
    columns = [*range(7, 30), *range(1100 + 7, 1100 + 30)]
    assert same_bits(activations.swiglu(x[2:3, columns].contiguous()), y[2:3, 7:30])
    assert same_bits(
        activations.swiglu_backward(dy[2:3, 7:30].contiguous(), x[2:3, columns].contiguous()), dx[2:3, columns]
    )


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
    tiles = fixed_tile_gemm.TILES
    for tile in list(tiles.values()):
        tiles[torch.float32] = tile
        for shape in RAGGED:
            a, b = operands(*shape, torch.float32)
            expected = a.double() @ b.double()
            there = torch.randn(expected.shape)
            for x, y, out, add in zip(layouts(a), layouts(b), layouts(there), (False, True, True), strict=True):
                before = out.double() * add
                fixed_tile_gemm.launch(x, y, out, add)
                torch.testing.assert_close(out.double(), before + expected, rtol=1e-5, atol=2e-5)


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
    for shape, kind in product(((5, 2, 4, 2, 16), (130, 1, 3, 1, 20), (128, 1, 2, 2, 64)), operands_of.ATTENTION_KINDS):
        assert attention_interpreted.differing_from_twin(25, *shape, kind) == [], (shape, kind)


def fp8_products_have_the_bits_of_the_definition():
    """With fewer bits of a tensor core, others."""
    assert fp8_interpreted.all_differing() == []
    assert fp8_interpreted.differing(12, "1x128", (E4M3, E4M3), 5, 9, 128)


KERNELS: dict[str, Callable[[], None]] = {
    name: function
    for name, function in [*globals().items()]
    if isfunction(function) and function.__module__ == __name__ and name[0] != "_" and name != "twins"
}
KERNELS |= {name: functools.partial(twins, name) for name in kernel_table.TWINS}


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
