# SPDX-License-Identifier: Apache-2.0
"""The conformance table of kernels: functions of the package, and operands that show how they round and add.

TWINS:  the function has the same bits by its form for a CPU, in Triton's interpreter and on a GPU. ON_GPU has those
        beside them that the interpreter runs in another way (interpreted.py), or not at all.
SLICED: each backend computes of a part of the operands that part of what it computes of all, and nearly what a CPU
        computes of the whole.

Triton's interpreter takes small operands (tests/unit/kernels/interpreted.py), a GPU takes those of a model
(tests/gpu/kernels/test_kernels.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from tests import fp8_operands
from tests.operands import ATTENTION_KINDS, KINDS, any_bits, finite_operands, normal, same_bits, sample
from tests.unit.kernels.gemm import test_quantize
from tests.unit.numerics.sums import test_grad_norm
from tests.unit.portable import test_draw, test_ieee_attention
from tp_invariant_recipes.kernels import (
    activations,
    causal_conv,
    clipped_adam,
    cross_entropy,
    digest,
    grad_norm,
    group_norm,
    message_digest,
    rms_norm,
    row_sums,
    tree_add,
)
from tp_invariant_recipes.kernels.gemm import fp8_tiles, mxfp8, quantize
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2
from tp_invariant_recipes.kernels.launch import TensorPart
from tp_invariant_recipes.numerics.gemm import fp8
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.sums.grad_norm import exact_grad_norm
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum
from tp_invariant_recipes.portable import definition
from tp_invariant_recipes.portable.ieee import adam as ieee_adam
from tp_invariant_recipes.portable.ieee import attention as ieee_attention
from tp_invariant_recipes.portable.ieee import cached_attention
from tp_invariant_recipes.portable.ieee import cross_entropy as ieee_cross_entropy
from tp_invariant_recipes.portable.ieee import delta_rule as ieee_delta
from tp_invariant_recipes.portable.ieee import draw as ieee_draw
from tp_invariant_recipes.portable.ieee import norm as ieee_norm
from tp_invariant_recipes.portable.ieee import rotary as ieee_rotary
from tp_invariant_recipes.portable.ieee import router as ieee_router
from tp_invariant_recipes.portable.ieee import storage as ieee_samples
from tp_invariant_recipes.portable.ieee import swiglu as ieee_swiglu

FP32, BF16 = torch.float32, torch.bfloat16
Calls = Iterator[tuple[Any, ...]]  # a function and its operands


def kinds(large: bool) -> Iterator[tuple[str, torch.dtype]]:
    """Kinds of operands with their dtype; few are small, since the interpreter is slow."""
    return product(KINDS, (BF16, FP32)) if large else iter((("wide", BF16), ("special", FP32), ("wide", FP32)))


def _tree_add(large: bool) -> Calls:
    for width in (1, 2, 4, 8, 16, 32, 64, *((128,) if large else ())):
        # A part of a block beside whole ones: a block has 1024 elements, of more than 8 partials 128.
        for size in (5001, 4096) if large else (5, 1040 if width <= 8 else 150):
            for dtype in (FP32, BF16) if large else (FP32,):
                yield tree_add.tree_add, normal(3, width, size), torch.zeros(3, size, dtype=dtype), 3


def _row_sum(large: bool) -> Calls:
    for dtype, features in product((FP32, BF16), (2048,)) if large else ((FP32, 40), (FP32, 1500)):
        yield row_sums.row_sum, normal(99, features, dtype=dtype), torch.arange(-1, 99).repeat(3)[:297].view(-1, 3)


def added(rows: Tensor, at: Tensor, out: Tensor, at_once: bool) -> Tensor:
    """A new sum of rows."""
    row_sums.add_rows(rows, at, out := out.clone(), at_once)
    return out


def _row_add(large: bool) -> Calls:
    shapes = ((4096, 512, 1024), (8192, 151936, 1024), (513, 64, 5000)) if large else ((24, 3, 40), (24, 12, 1500))
    for (tokens, table, features), dtype in product((*shapes, (24, 1, 8)), (FP32, BF16) if large else (FP32,)):
        at = torch.randint(-2, table, (tokens,), generator=torch.Generator().manual_seed(0))
        at[::3] = 0
        for at_once in (False, True):
            yield added, normal(tokens, features, dtype=dtype), at, normal(table, features, seed=1), at_once


def _norms(large: bool) -> Calls:
    shapes = ((256, 1, 1000, 8, False), (56, 1, 5000, 8, False), (256, 16, 128, 8, True))
    small = ((24, 1, 96, 4, False), (16, 8, 24, 2, True), (6, 1, 5000, 2, False))
    for (tokens, heads, width, *shards), (kind, dtype) in product(shapes if large else small, kinds(large)):
        x, dy = (sample(kind, tokens, heads, width, dtype=dtype, seed=seed) for seed in (0, 1))
        weight = sample("normal", width, dtype=dtype, seed=2)
        yield ieee_norm.rms_norm_forward, x, weight, 1e-6
        yield ieee_norm.rms_norm_backward, dy, x, weight, ieee_norm.rms_norm_forward(x, weight, 1e-6)[1], *shards


def _swiglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return ieee_swiglu.swiglu_backward(dy, x)[0]


def _swiglu(large: bool) -> Calls:
    for (kind, dtype), width in product(kinds(large), (768, 3000) if large else (70, 1100)):
        rows = 300 if large else 3
        x, dy = sample(kind, rows, 2 * width, dtype=dtype), sample(kind, rows, width, dtype=dtype, seed=1)
        p = sample("normal", rows, dtype=dtype, seed=2)
        yield from ((ieee_swiglu.swiglu, x), (_swiglu_gradient, dy, x))
        yield from ((ieee_swiglu.swiglu, x, p), (ieee_swiglu.swiglu_backward, dy, x, p))


def _rotary(large: bool) -> Calls:
    positions, width = (300, 96) if large else (10, 32)
    tables = ieee_rotary.tables(positions, width, 1e6)
    for (kind, dtype), more in product(kinds(large), (0, 32 if large else 12)):
        yield ieee_rotary.rotate, sample(kind, positions, 2, 4, width + more, dtype=dtype), *tables


def _cross_entropy(large: bool) -> Calls:
    sizes = ((64, 18992 * 2, 2),) if large else ((3, 300, 2), (3, 5000, 1))
    for (rows, vocabulary, shards), (kind, dtype) in product(sizes, kinds(large)):
        logits, gradient = sample(kind, rows, vocabulary, dtype=dtype), sample("normal", rows, seed=1)
        highest = logits.amax(-1).float().nan_to_num(nan=torch.inf)
        total = ieee_cross_entropy.sum_of_exponentials(logits, highest, shards)[0]
        index = torch.tensor([vocabulary - 1, -1, *range(rows - 2)])
        yield ieee_cross_entropy.sum_of_exponentials, logits, highest, shards
        yield ieee_cross_entropy.softmax_gradient, logits, index, highest, total, gradient, shards
        yield ieee_cross_entropy.logarithm, total
        finite = logits.nan_to_num()
        yield cross_entropy.log_probabilities, finite, finite.amax(-1).float(), sample("normal", rows, seed=2)
        yield cross_entropy.count_greater, logits, logits[:, vocabulary // 2].float().contiguous()


def _stepped(decoupled: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    numbers, changed = ieee_adam.adam_numbers(5, 1e-3, (0.9, 0.95), 1e-8, 0.1), [part.clone() for part in tensors]
    ieee_adam.adam_step(*changed, numbers, decoupled)
    return tuple(changed)


def _adam(large: bool) -> Calls:
    for kind, decoupled in product(KINDS, (True, False)):
        yield _stepped, decoupled, *(sample(kind, 100_001 if large else 2500, seed=seed) for seed in range(4))


def _clipped(clip: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Clipping and AdamW of two parameters that fill no block; without the copy, since the interpreter cuts bf16."""
    settings, changed = clipped_adam.Settings(5, 1e-3, (0.9, 0.95), 1e-8, 0.1), [part.clone() for part in tensors]
    copy, half = torch.zeros_like(changed[0], dtype=BF16), len(tensors[0]) // 2
    parts = [tuple(x[at] for x in (*changed, copy)) for at in (slice(0, half), slice(half, None))]
    if copy.is_cuda:
        clipped_adam.clipped_adam(parts, clip, settings, ieee_adam.CLIPPED)
    else:
        for p, g, m, v, _ in parts:
            g *= clip
            ieee_adam.adam_step(p, g, m, v, ieee_adam.adam_numbers(*settings))
    return tuple(changed)


def _clipped_adam(large: bool) -> Calls:
    for kind, clip in product(("normal", "wide", "cancelling"), (1.0, 0.37, 2.0**-20)):
        yield _clipped, clip, *(sample(kind, 300_008 if large else 2504, seed=seed) for seed in range(4))


def _routers(large: bool) -> Calls:
    for kind, dtype, (experts, topk) in product(("normal", "wide"), (BF16, FP32), ((8, 2), (128 if large else 100, 8))):
        rows = 300 if large else 5
        logits = sample(kind, rows, experts, dtype=dtype)
        logits[0], logits[1, ::2] = 1.5, 0.25
        dp, ds = sample(kind, rows, experts, dtype=dtype, seed=1), sample(kind, rows, experts, seed=2)
        yield ieee_router.route_tokens, logits, topk
        yield ieee_router.route_tokens_backward, dp, ds, logits, ieee_router.route_tokens(logits, topk)[2]


def _walked(spans: Tensor, states: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor]:
    states = states.clone()
    return ieee_delta.delta_rule(ieee_delta.Numbers(*numbers), spans, 1, states), states


def _delta_rule(large: bool) -> Calls:
    """Sequences of several lengths from states of their own; one begins, and one has no row."""
    rows, heads, key, value = (200, 16, 128, 128) if large else (5, 2, 12, 9)
    numbers = [sample("normal", rows, heads, width, seed=n) * 0.1 for n, width in enumerate((key, key, value))]
    numbers += [sample("normal", rows, heads, seed=n).sigmoid() for n in (3, 4)]
    spans = torch.tensor([(0, rows - 3, 2, 1), (0, 0, 0, 0), (rows - 3, 3, 1, 0)], dtype=torch.int32)
    yield _walked, spans, sample("normal", 3, heads, value, key), *numbers


def _sigmoid_routers(large: bool) -> Calls:
    """On a GPU alone: torch's operations."""
    for dtype in (BF16, FP32) if large else ():
        logits, bias = sample("normal", 300, 256, dtype=dtype), sample("normal", 256, seed=1)
        yield ieee_router.route_by_sigmoid, logits, 8, bias, (8, 4), 2.5


def _functions(large: bool) -> Calls:
    numbers = [any_bits(100_000, seed) for seed in range(4)] if large else [definition.samples().copy()]
    yield from ((ieee_samples.values, torch.from_numpy(values)) for values in numbers)


def _draws(large: bool) -> Calls:
    """Of a group of words and a part of one; the greatest of several programs."""
    for count, vocabulary in ((1, 151936), (64, 151936), (300, 5003), (16, 300)) if large else ((8, 4200), (8, 300)):
        for kind in test_draw.KINDS if large else ("ties",):
            scores, keys, numbers = test_draw.inputs(count, vocabulary, kind)
            highest, do_sample, temperature = scores.amax(-1), numbers[:, 0].int(), numbers[:, 1].float()
            limits = ieee_draw.kept(scores, highest, numbers)
            yield ieee_draw.race, scores, highest, do_sample, temperature, keys, limits
            if large or vocabulary == 300:
                yield ieee_draw.draw, scores, keys, numbers
            if large:
                yield digest.row_digest, scores, 0, vocabulary


def _mxfp8(large: bool) -> Calls:
    sizes, k = ((40, 0, 3, 300, 41), 480) if large else ((40, 0, 3, 32), 160)
    groups = Groups(sizes, torch.tensor(sizes))
    forms = (E4M3, True, True, groups), (E5M2, True, False, None), (E4M3, False, True, None)
    for kind in ("normal", "wide", "small", "large", "ties", "bits") if large else ("wide", "small", "bits", "ends"):
        for dtype, rows, columns, of_groups in forms:
            x = test_quantize.operand(kind, rows=sum(sizes) if of_groups else 64, k=k)
            yield mxfp8.sides, x, dtype, rows, columns, of_groups


def _message_digest(messages: Tensor, number: int) -> Tensor:
    table = torch.full((9,), 2**62 + 1, device=messages.device)
    message_digest.add_digests(message_digest.words(messages), table, 3, number)
    return table


def _message_digests(large: bool) -> Calls:
    """Words of each size, one program and several, rows that end within a program; a message that is a view."""
    for dtype, size in (
        (FP32, 1),
        (FP32, 5000),
        (BF16, 1023),
        (torch.uint8, 4099),
        *(((BF16, 2**22),) if large else ()),
    ):
        for number in (0, 7):
            yield _message_digest, _bytes((5, size), dtype, size), number
    yield _message_digest, _bytes((4, 3001), BF16, 1)[:, 1:], 2


TWINS: dict[str, Callable[[bool], Calls]] = {
    "tree_add": _tree_add, "row_sum": _row_sum, "row_add": _row_add, "portable norms": _norms,
    "portable SwiGLU": _swiglu, "portable rotary": _rotary, "portable cross entropy": _cross_entropy,
    "portable Adam": _adam, "clipped portable Adam": _clipped_adam, "portable routers": _routers,
    "portable functions": _functions, "portable draws": _draws,
    "MXFP8": _mxfp8, "message digests": _message_digests, "portable delta rule": _delta_rule,
    "portable sigmoid routers": _sigmoid_routers,
}  # fmt: skip


# --- on a GPU alone ---


def digested(magnitude: bool, *pieces: TensorPart) -> tuple[Tensor, ...]:
    """Lanes, the largest magnitude, and how many numbers their copies do not follow."""
    taken = digest.Lanes(list(pieces), magnitude=magnitude)
    return taken(), taken.unlike, *((taken.largest,) if magnitude else ())


def _views(whole: Tensor, shift: int) -> Tensor:
    """The lanes of unaligned and strided pieces."""
    rows = whole[shift::2, shift : shift + 2001]
    return digest.lanes([TensorPart(rows, shift, shift, 2), TensorPart(whole[:, :1], 0, 0)])


def _bytes(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    noise = torch.Generator().manual_seed(seed)
    count = shape[0] * shape[1] * size
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=noise).view(dtype).view(shape)


def _digests(large: bool) -> Calls:
    """Ties, NaNs, infinities; copies that are rows of a wider table; pieces without a copy beside them."""
    rows, columns = digest.ROWS, digest.COLUMNS
    shapes = ((1, 1), (1, columns), (3, columns + 1), (rows, 7), (rows + 1, 4), (2 * rows + 3, 2 * columns + 5), (0, 8))
    for dtype in (FP32, BF16, torch.float16, torch.uint8, torch.float64, torch.int64):
        pieces = [TensorPart(_bytes(shape, dtype, n), 5 * n, 3 * n, 1 + n % 3) for n, shape in enumerate(shapes)]
        yield digested, dtype in digest.WITH_MAGNITUDE, *pieces
    for dtype, shift in product((FP32, BF16), (1, 2, 3, 7)):
        yield _views, _bytes((70, 3000), dtype, shift), shift
    pieces = []
    for n, shape in enumerate(shapes):
        values = _bytes(shape, FP32, n)
        flat = values.view(-1).view(torch.int32)
        flat[::3] = flat[::3] & ~0xFFFF | 0x8000
        copy = torch.empty(shape[0], shape[1] + n, dtype=BF16)[:, : shape[1]].copy_(values)
        for at in range(0, values.numel(), max(1, values.numel() // 5)):
            row, column = divmod(at, shape[1])
            copy[row, column] = 1.0 if values[row, column] != 1.0 else 2.0
        pieces += [TensorPart(values, 5 * n, 3 * n, 1, copy), TensorPart(_bytes(shape, BF16, n), 0, 0)]
    yield digested, False, *pieces


def norm_numbers(offset: int, *grads: Tensor) -> tuple[Tensor, ...]:
    """What the gradient norm is made of, from copies `offset` elements from where an allocator puts them."""
    copies = [torch.empty(g.numel() + offset, device=g.device)[offset:].copy_(g.flatten()).view(g.shape) for g in grads]
    largest = grad_norm.largest(copies)
    return largest, grad_norm.square_limbs(copies, largest)


def _norm(*grads: Tensor) -> Tensor:
    mixed = [*grads[::2], *(g.t() if g.dim() == 2 else g.cpu() for g in grads[1::2])]  # some are left on the CPU
    return torch.tensor(
        [exact_grad_norm(grads), exact_grad_norm(mixed), exact_grad_norm([grads[0].float(), *mixed[1:]])]
    )


def _grad_norms(large: bool) -> Calls:
    for case, offset in product(test_grad_norm.kernel_cases(), (0, 1, 3)):
        yield norm_numbers, offset, *case
    for dtype in (FP32, BF16, torch.float16):
        parts = test_grad_norm.spread_values(2, 70000, 8)[0].split(23333)
        yield _norm, *(g.to(dtype) for g in (*parts, test_grad_norm.spread_values(3, 5000, 0)[0].view(50, 100)))


def _drawn(like: Tensor, shape: Sequence[int], ranges: Any, chunk: int, dtype: torch.dtype) -> Tensor:
    """Initial weights on the device of `like`."""
    with patch.object(init, "CUDA_CHUNK", chunk):
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        how = {"seed": (1 << 63) + 5, "name": name, "dtype": dtype, "device": like.device.type}
        return init.sample(shape, ranges, init._Normal(0.02), **how)


def _initial_weights(large: bool) -> Calls:
    parts = (
        ((5,), [[(1, 4)]]), ((1000, 333), [[(0, 1000)], [(0, 333)]]),
        ((1000, 333), [[(250, 500), (750, 1000)], [(7, 200)]]),
        ((64, 3, 1001), [[(0, 64)], [(1, 3)], [(3, 4), (500, 1001)]]), ((2, 600000), [[(0, 2)], [(1, 600000)]]),
    )  # fmt: skip
    for (shape, ranges), chunk, dtype in product(parts, (1 << 24, 1000), (FP32, BF16)):
        yield _drawn, torch.empty(0), shape, ranges, chunk if shape[-1] < 1001 else 1 << 24, dtype
    last, near = (1 << 52) - 1, torch.arange(1 << 16)
    middle = torch.randint(0, last, (1 << 22,), generator=torch.Generator().manual_seed(0))
    yield init._ppnd16, torch.cat((near, last - near, middle, near << 20, near << 36))[None]


def attended(scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Portable attention, forward and backward. tensors: query, key, value, the output's gradient."""
    *operands, gradient = tensors
    result = ieee_attention.attention_forward(*operands, scale)
    return *result, *ieee_attention.attention_backward(gradient, *operands, result, scale)


def _attentions(large: bool) -> Calls:
    shapes = ((5, 2, 4, 2, 16), (130, 1, 3, 1, 20), (200, 2, 8, 2, 64), (1000, 1, 4, 2, 128), (256, 1, 2, 2, 256))
    for shape, kind in product(shapes, ATTENTION_KINDS):
        yield attended, float(np.float32(shape[-1] ** -0.5)), *finite_operands(*shape, kind)


def _cached_attentions(large: bool) -> Calls:
    heads = ((4, 2, 24), (16, 8, 128), (5, 1, 64), (32, 1, 16))
    chunks = ((1, 1, 1, 1), (1, 7, 70, 130), (1, 64, 3, 65))
    for (h, g, d), chunk, size in product(heads, chunks, (1, 16, 64, 256)):
        most = cached_attention.rows_of_tile(h // g, max(chunk))
        made = test_ieee_attention.laid_out(test_ieee_attention.operands(h, g, d), size, chunk, longest=most)
        yield cached_attention.cached_attention, *made[:4], 0.25


def _quantized(large: bool) -> Calls:
    for seed, form in product(range(2), (quantize.along_rows, quantize.of_blocks)):
        yield form, sample(KINDS[seed], 384, 512, dtype=BF16, seed=seed).nan_to_num(0, 0, 0), E4M3


def _into(function: Callable[..., Any], a: Any, b: Any, out: Any, *more: Any) -> Any:
    """What a function fills or adds to, in memory of its own."""
    made = [item.clone() for item in out] if isinstance(out, list) else out.clone()
    function(a, b, made, *more)
    return tuple(made) if isinstance(made, list) else made


def _tiles(a: Any, b: Any, out: Tensor, add: bool) -> None:
    (fp8_tiles.gemm if out.is_cuda else fp8.on_cpu)(a, b, out, add)


def _nodes(a: Any, b: Any, mesh: VirtualMesh, segments: tuple[int, ...]) -> Tensor:
    """Each device may have added some nodes already."""
    return tree_sum(fp8.nodes(a, b, mesh, segments))


def _fp8(large: bool) -> Calls:
    """By fixed tiles, and with infinities and NaN; of a rank's shards; of experts, and their weight gradients."""
    forms = ((FP32, False), (BF16, False), (FP32, True))
    for kind, types, (m, n, k) in product(
        fp8_operands.KINDS,
        fp8_operands.TYPES,
        ((5, 7, 33), (130, 200, 1111), (256, 384, 4096), (1, 128, 128), (40, 135, 400)),
    ):
        a, b = fp8_operands.operands(kind, m, n, k, types)
        for x in (a, b) if m == 40 else ():
            special = (0x7C, 0xFC, 0x7D, 0xFF) if x.data.dtype == E5M2 else (0x7F, 0xFF)
            for row in range(0, len(x.data), 7):
                x.data.view(torch.uint8)[row, row * 13 % k] = special[row // 7 % len(special)]
        for dtype, add in forms:
            yield _into, _tiles, a, b, normal(m, n, dtype=dtype), add
    for kind, segments in product(fp8_operands.KINDS, ((2048,), (1024, 1024))):
        a, b = fp8_operands.operands(kind, 64, 256, 2048, (E5M2, E4M3))
        yield _nodes, a, b, VirtualMesh(8, 2, 0), segments
    for kind, dtype in product(fp8_operands.KINDS, (FP32, BF16)):
        sizes = (3, 0, 130, 257)
        x, _ = fp8_operands.operands(kind, sum(sizes), 272, 512, (E4M3, E4M3))
        x = quantize.Quantized(x.data, torch.rand(len(sizes)) + 0.5) if kind == "tensor" else x
        weights = [fp8_operands.operands(kind, 1, 272, 512, (E4M3, E4M3), seed)[1] for seed in range(len(sizes))]
        groups = Groups(sizes, torch.tensor(sizes))
        yield _into, fp8.grouped_gemm, x, weights, torch.zeros(sum(sizes), 272, dtype=dtype), groups
    for kind, sizes in (
        *product(("tensor",), ((16, 0, 48, 144), (3, 0, 130, 7))),
        *product(KINDS_1D, ((128, 0, 256, 128),)),
    ):
        dy, x = fp8_operands.operands(kind, 144, 272, sum(sizes), (E5M2, E4M3))
        if kind == "tensor":
            dy, x = (quantize.Quantized(item.data, torch.rand(len(sizes)) + 0.5) for item in (dy, x))
        for chain in ((0,), (1, 0), (0, 2, 1, 3)):
            outs = [normal(144, 272, seed=n) for n in range(len(sizes) // len(chain))]
            yield _into, fp8.grouped_weight_gradient, dy, x, outs, Groups(sizes, torch.tensor(sizes)), chain


KINDS_1D = ("tensor", "1x128")
ON_GPU: dict[str, Callable[[bool], Calls]] = TWINS | {
    "digests": _digests, "gradient norms": _grad_norms, "initial weights": _initial_weights,
    "portable attention": _attentions, "portable attention to cached keys": _cached_attentions,
    "FP8 operands": _quantized, "FP8 products": _fp8,
}  # fmt: skip


def moved(value: Any) -> Any:
    """A copy on the GPU; scales of 1x128 lie as Transformer Engine's do."""
    if isinstance(value, Groups):
        return Groups(value.sizes, value.counts.cuda())
    if isinstance(value, quantize.Quantized):
        scale = value.scale.t().contiguous().cuda().t() if value.blocks == "1x128" else value.scale.cuda()
        return quantize.Quantized(value.data.cuda(), scale, value.blocks)
    if isinstance(value, TensorPart):
        return value._replace(values=value.values.cuda(), copy=None if value.copy is None else value.copy.cuda())
    if isinstance(value, cached_attention.Spans):
        return value._replace(tables=value.tables.cuda(), positions=value.positions.cuda())
    if isinstance(value, list):
        return [moved(item) for item in value]
    return value.cuda() if isinstance(value, Tensor) else value


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """All tensors that a function gave, on the CPU."""
    if isinstance(result, quantize.Quantized):
        return result.data.view(torch.uint8).cpu(), result.scale.cpu()
    return tuple(item.cpu() for item in (result if isinstance(result, tuple) else (result,)))


@dataclass(frozen=True)
class Sliced:
    """A function of parts of tensors.

    call:    of the number of the part, its shards, and the parts. tensors: the whole.
    cut:     of each tensor the dimension that is cut; None: every part has all.
    joined:  of each result the dimension along which parts make the whole.
    shards:  of the whole. leaves: whether the last result is a sum in leaves along dimension 1.
    """

    call: Callable[..., tuple[Tensor, ...]]
    tensors: Sequence[Tensor]
    cut: Sequence[int | None]
    joined: Sequence[int]
    shards: int = 8
    leaves: bool = True

    def check(self, degrees: Sequence[int], kernels: Callable[[], Any] = nullcontext) -> None:
        """Assert that parts are parts of the whole, and the whole nearly the CPU's. kernels: lets kernels compute."""
        with kernels():
            found = self.call(0, self.shards, *self.tensors)
            for degree in degrees:
                assert all(map(same_bits, found, self._parts(degree))), (self.call.__name__, degree)
        exact = self.call(0, self.shards, *(_wide(tensor.cpu()) for tensor in self.tensors))
        for n, (result, expected) in enumerate(zip(found, exact, strict=True)):
            if self.leaves and n == len(found) - 1:
                result, expected = result.sum(1), expected.sum(1)
            error = (result.cpu().double() - expected.double()).norm() / expected.double().norm()
            assert error < (1e-2 if BF16 in (result.dtype, self.tensors[0].dtype) else 1e-4), (
                self.call.__name__,
                n,
                error,
            )

    def _parts(self, degree: int) -> list[Tensor]:
        """Of each of `degree` parts, put together; every other part in memory of its own."""
        results = []
        for rank in range(degree):
            mine = [
                whole if dim is None else whole.chunk(degree, dim)[rank]
                for whole, dim in zip(self.tensors, self.cut, strict=True)
            ]
            mine = [part.contiguous() if rank % 2 else part for part in mine]
            results.append(self.call(rank, self.shards // degree, *mine))
        return [torch.cat(pieces, dim) for pieces, dim in zip(zip(*results, strict=True), self.joined, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _rms_norm(by_heads: bool) -> Callable[..., tuple[Tensor, ...]]:
    def norm(rank: int, shards: int, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, scale = rms_norm.rms_norm_forward(x, weight, 1e-6)
        return y, *rms_norm.rms_norm_backward(dy, x, weight, scale, shards, by_heads)

    return norm


def _entropy(rank: int, shards: int, logits: Tensor, index: Tensor, highest: Tensor, total: Tensor, dy: Tensor) -> Any:
    logits = logits.contiguous()  # as the logits of a shard of the vocabulary are; the kernels take no strides
    partials = cross_entropy.sum_of_exponentials(logits, highest, shards)
    mine = index - rank * logits.shape[1]
    return cross_entropy.softmax_gradient(logits, mine, highest, total, dy, shards), partials.unsqueeze(0)


def _token_sum(single: bool) -> Callable[..., tuple[Tensor, ...]]:
    return lambda rank, shards, values: (row_sums.token_sum(values, 1 if single else shards),)


def _conv(step: int) -> Callable[..., tuple[Tensor, ...]]:
    def conv(rank: int, shards: int, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        y = causal_conv.causal_conv_forward(x, weight, bias, step)
        return y, *causal_conv.causal_conv_backward(dy, x, weight, bias, step)

    return conv


def _group_norm(rank: int, shards: int, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y, scale = group_norm.group_norm_forward(x, weight, 1e-5)
    return y, scale, *group_norm.group_norm_backward(dy, x, weight, scale)


def _activation(kind: Any) -> Callable[..., tuple[Tensor, ...]]:
    def activation(rank: int, shards: int, x: Tensor, p: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y = activations.weighted_activation(x, p, kind)
        return y, *activations.weighted_activation_backward(dy, x, p, kind)

    return activation


ACTIVATIONS = (
    *("swiglu", "squared_relu"),
    activations.Clamped(1.702, 0.7, 1.0),
    activations.Clamped(1.0, float("inf"), 0.5),
)


def sliced(large: bool, dtype: torch.dtype = FP32, device: str = "cpu") -> Iterator[Sliced]:
    """The rows of the table. dtype: of operands; the interpreter does not know bf16's rounding."""

    def drawn(*shape: int, of: torch.dtype = dtype, seed: int = 0) -> Tensor:
        return normal(*shape, dtype=of, seed=seed).to(device)

    norms = ((256, 1, 1024, False), (2048, 1, 4096, False), (512, 32, 128, True), (96, 8, 24, True))
    few = ((32, 1, 96, False), (16, 8, 24, True), (8, 1, 5000, False))
    for tokens, heads, width, by_heads in norms if large else few:
        x, dy = drawn(tokens, heads, 2 * width)[..., :width], drawn(tokens, heads, width, seed=1)
        at = int(by_heads)  # as Megatron's keys are: heads with gaps between them
        yield Sliced(_rms_norm(by_heads), (x, dy, drawn(width, seed=2)), (at, at, None), (at, at, 0))
    if large:  # the interpreter lacks the exponential
        logits, index, dy = drawn(64, 8 * 19000), torch.arange(64, device=device) * 2000, drawn(64, of=FP32, seed=1)
        highest = logits.amax(-1).float()
        total = (logits.float() - highest[:, None]).exp().sum(-1)
        yield Sliced(_entropy, (logits, index, highest, total, dy), (1, None, None, None, None), (1, 1))
    values = drawn(256 if large else 24, 1600 if large else 320)
    yield from (Sliced(_token_sum(at == 1), (values,), (at,), (2 * at,)) for at in (0, 1))
    for rows, channels, step in ((2048, 768, 1), (1000, 320, 2), (96, 37, 4)) if large else ((72, 37, 2),):
        x, dy = (drawn(8, rows, channels, seed=n) for n in (0, 1))
        weight, bias = drawn(8, channels, 4, seed=2), drawn(8, channels, seed=3)
        yield Sliced(_conv(step), (x, dy, weight, bias), (0,) * 4, (0,) * 3)
    for rows, groups, width in ((2048, 1, 512), (1000, 2, 256), (96, 3, 20)) if large else ((48, 3, 20),):
        x, dy = (drawn(8, rows, groups, width, seed=n) for n in (0, 1))
        yield Sliced(_group_norm, (x, dy, drawn(8, groups, width, seed=2)), (0,) * 3, (0,) * 4)
    for kind, features in product(ACTIVATIONS, (768, 1856, 64) if large else (200,)):
        x = drawn(700 if large else 11, features * (1 if kind == "squared_relu" else 2))
        p, dy = drawn(len(x), of=FP32, seed=1).abs(), drawn(len(x), features, seed=2)
        yield Sliced(_activation(kind), (x, p, dy), (0,) * 3, (0,) * 3, leaves=False)
