# SPDX-License-Identifier: Apache-2.0
"""`fp8 tiles 1`: its definition against bits that cuBLAS gave on Hopper, the compiled form against both. FP8 products
of shards, tokens and experts on a CPU, their refusals, and the trial that lets cuBLAS compute them.
"""

import re
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch

from tests.definitions import fp8_sum
from tests.definitions.fp8_sum import _accumulated, _split, fp8_product
from tests.definitions.tensor_core_sum import fma
from tests.fp8_operands import KINDS, TYPES, numbers, operands
from tests.fp8_recorded import BLOCKS, CASES, SPLIT, bits, recorded, same_as_recorded
from tests.operands import same_bits, threads
from tp_invariant_recipes.kernels.cpu import fp8_cpu
from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import rounded
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.gemm import fp8, fp8_cublas
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum


@pytest.mark.parametrize("case", SPLIT)
def test_the_definition_and_the_compiled_form_have_the_bits_of_hopper(case):
    a, b, forms = recorded(case)
    for total in (fp8_product(a, b), fp8_cpu.gemm(a, b)):
        same = same_as_recorded(total, forms)
        assert same
        assert all(same.values()), same


@pytest.mark.parametrize("case", [case for case in CASES if "fast" in recorded(case)[2]])
def test_fast_accumulation_is_one_accumulator_over_all_of_k(case):
    a, b, forms = recorded(case)
    assert (bits(torch.from_numpy(fp8_product(a, b, promoted=1 << 20))) == forms["fast"]).all()


# --- other arithmetic ---


def wrong_scale_order(a, b):
    """(main * scale_a) * scale_b; (p * scale_b) * scale_a of blocks of 128x128, p * (scale_a * scale_b) of 1x128."""
    return _by_blocks(
        a,
        b,
        lambda p, sa, sb, main: fma(p * sa, sb, main) if b.blocks == "128x128" else fma(p, sa * sb, main),
        lambda main, sa, sb: (main * sa) * sb,
    )


def no_fma(a, b):
    return _by_blocks(
        a,
        b,
        lambda p, sa, sb, main: (p * sa) * sb + main if b.blocks == "1x128" else p * (sa * sb) + main,
        lambda main, sa, sb: main * (sa * sb),
    )


def through_fp64(a, b):
    """FMA through fp64, which rounds the sum twice."""

    def fma64(x, y, z):
        return (x.astype(np.float64) * y + z).astype(np.float32)

    return _by_blocks(
        a,
        b,
        lambda p, sa, sb, main: fma64(p * sa, sb, main) if b.blocks == "1x128" else fma64(p, sa * sb, main),
        lambda main, sa, sb: main * (sa * sb),
    )


def from_the_end(a, b):
    blocks = range(0, a.data.shape[1], BLOCK)
    k = torch.cat([torch.arange(start, min(start + BLOCK, a.data.shape[1])) for start in reversed(blocks)])
    q = torch.arange(len(blocks)).flip(0)
    return fp8_product(
        *(Quantized(x.data[:, k], x.scale if x.blocks == "tensor" else x.scale[:, q], x.blocks) for x in (a, b))
    )


def _by_blocks(a, b, enter, end):
    (x, ex), (y, ey) = _split(a.data), _split(b.data)
    main = np.zeros((len(x), len(y)), np.float32)
    sa, sb = a.scale.numpy(), b.scale.numpy()
    with np.errstate(all="ignore"):
        for start in range(0, x.shape[1], BLOCK):
            part, q = slice(start, start + BLOCK), start // BLOCK
            p = _accumulated(x[:, part], y[:, part], ex[:, part], ey[:, part], fp8_sum.KEPT_BITS)
            if b.blocks == "tensor":
                main = main + p
            else:
                scale = sb[None, :, q] if b.blocks == "1x128" else np.repeat(sb[:, q], BLOCK)[None, : len(y)]
                main = enter(p, sa[:, q, None], scale, main)
        return end(main, sa.reshape(()), sb.reshape(())) if b.blocks == "tensor" else main


# What differs from the definition -> the product, and the kinds of recorded cases that must show it.
OTHER_SUM = {
    "12 bits": (partial(fp8_product, kept=12), BLOCKS),
    "14 bits": (partial(fp8_product, kept=14), BLOCKS),
    "a new accumulator every 64": (partial(fp8_product, promoted=64), ("tensor",)),
    "a new accumulator every 256": (partial(fp8_product, promoted=256), ("tensor",)),
    "fast accumulation": (partial(fp8_product, promoted=1 << 20), ("tensor",)),
    "scales in another order": (wrong_scale_order, BLOCKS),
    "a product and a sum for an FMA": (no_fma, ("1x128", "128x128")),
    "k from its end": (from_the_end, BLOCKS),
}
# A name of the definition, another value of it, and these kinds.
CHANGED = (
    ("STEP", 16, BLOCKS),
    ("LEAST", {E4M3: -7, E5M2: -15}, ("tensor",)),  # the exponent of subnormal numbers
    ("LEAST", {E4M3: -5, E5M2: -13}, ("tensor",)),
)


def differing(gemm, kinds):
    """Those of these kinds of recorded cases that show that this product is another."""
    different = set()
    for case in SPLIT:
        a, b, forms = recorded(case)
        if a.data.shape[1] > 1024 or b.blocks not in kinds or b.blocks in different or "special" in case:
            continue
        if not all(same_as_recorded(gemm(a, b), forms).values()):
            different.add(b.blocks)
    return different


@pytest.mark.parametrize("what", OTHER_SUM)
def test_other_arithmetic_has_other_bits(what):
    gemm, kinds = OTHER_SUM[what]
    assert differing(gemm, kinds) == set(kinds)


@pytest.mark.parametrize("name, value, kinds", CHANGED, ids=str)
def test_another_constant_has_other_bits(monkeypatch, name, value, kinds):
    monkeypatch.setattr(fp8_sum, name, value)
    assert differing(fp8_product, kinds) == set(kinds)


def test_a_bf16_output_is_rounded_once_and_after_the_sum():
    """The controls of how outputs are rounded: toward zero first, and the sum of two rounded ones."""
    shown = {"twice": 0, "cut": 0, "rounded before it is added": 0, "by an FMA": 0}
    for case in SPLIT:
        a, b, forms = recorded(case)
        total = torch.from_numpy(fp8_product(a, b))
        if "bf16" in forms:
            half = total.to(torch.float16).float() if total.abs().max() < 6e4 else total
            shown["twice"] += int((bits(half.bfloat16()) != forms["bf16"]).sum())
            cut = torch.from_numpy((bits(total) & 0xFFFF0000).view(np.float32))
            shown["cut"] += int((bits(cut.bfloat16()) != forms["bf16"]).sum())
        if "added" in forms:
            main = torch.from_numpy(forms["main"])
            shown["rounded before it is added"] += int((bits(main + total.bfloat16().float()) != forms["added"]).sum())
            if b.blocks == "tensor":
                single = torch.ones(())
                plain = fp8_product(Quantized(a.data, single), Quantized(b.data, single))
                fused = fma(plain, (a.scale * b.scale).numpy().reshape(1, 1), forms["main"])
                shown["by an FMA"] += int((fused.view(np.uint32) != forms["added"]).sum())
    assert min(shown.values()) > 100, shown


@pytest.mark.parametrize("kind", ("1x128", "128x128"))
def test_the_fma_of_a_block_is_rounded_once(kind):
    """1 + 2^-24 * (1 + 2^-36): beyond the middle of two fp32 numbers; fp64 rounds to the middle, and then to even."""
    data = torch.zeros(1, 256)
    data[0, 0] = data[0, 128] = 1
    data[0, 129] = 2.0**-6  # p of the second block is 1 + 2^-12
    a = Quantized(data.to(E4M3), torch.ones(1, 2), "1x128")
    b = Quantized(data.to(E4M3), torch.tensor([[1, 2.0**-24 * (1 - 2.0**-12 + 2.0**-24)]]), kind)
    assert fp8_product(a, b).item() == fp8_cpu.gemm(a, b).item() == 1 + 2.0**-23
    assert through_fp64(a, b).item() == 1


# --- the compiled form ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("shape", ((1, 1, 1), (3, 5, 257), (19, 133, 300), (2, 0, 3), (0, 3, 128)), ids=str)
def test_the_compiled_form_is_the_definition(kind, types, shape):
    m, n, k = shape
    a, b = operands(kind, m, n, k, types)
    expected = fp8_product(a, b)
    assert (bits(fp8_cpu.gemm(a, b)) == expected.view(np.uint32)).all()
    # The largest numbers, and subnormal ones.
    for scale in (2.0**20, 2.0**-10):
        c = [Quantized((x.data.float() * scale).clamp(-448, 448).to(x.data.dtype), x.scale, x.blocks) for x in (a, b)]
        assert (bits(fp8_cpu.gemm(*c)) == fp8_product(*c).view(np.uint32)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_infinities_and_nan_are_those_of_the_definition(kind, types):
    a, b = operands(kind, 40, 135, 400, types)
    clean = fp8_product(a, b)
    random = np.random.default_rng(0)
    for x in (a, b):
        raw = x.data.view(torch.uint8)
        special = [0x7C, 0xFC, 0x7D, 0xFF] if x.data.dtype == E5M2 else [0x7F, 0xFF]
        for row in range(0, len(raw), 7):
            raw[row, int(random.integers(0, 400))] = special[row // 7 % len(special)]
    result, expected = fp8_cpu.gemm(a, b), fp8_product(a, b)
    assert (bits(result) == expected.view(np.uint32)).all()
    untouched = np.ix_(np.arange(40) % 7 > 0, np.arange(135) % 7 > 0)
    assert (bits(result)[untouched] == clean.view(np.uint32)[untouched]).all()
    assert (~np.isfinite(expected)).sum() == expected.size - clean[untouched].size


@pytest.mark.parametrize("kind", KINDS)
def test_neither_strides_nor_neighbours_nor_threads_change_a_bit(kind):
    a, b = operands(kind, 130, 300, 512, (E4M3, E4M3))
    whole = fp8_cpu.gemm(a, b)
    for count in (1, 3):
        with threads(count):
            assert same_bits(fp8_cpu.gemm(a, b), whole)
    part = fp8_cpu.gemm(a.of_rows(7, 2), b.of_rows(128, 128))
    assert same_bits(part, whole[7:9, 128:256].contiguous())
    assert same_bits(fp8.gemm(a, b, torch.empty(300, 130).t()), whole)
    strided = Quantized(torch.stack([a.data, a.data], 1)[:, 0], a.scale.t().contiguous().t(), a.blocks)
    assert same_bits(fp8_cpu.gemm(strided, b), whole)


def test_zeros_that_pad_k_change_nothing():
    a, b = (Quantized(numbers(9, 200, E4M3, seed), torch.ones(())) for seed in (0, 1))
    padded = [
        Quantized(torch.nn.functional.pad(x.data.view(torch.uint8), (0, 100)).view(E4M3), x.scale) for x in (a, b)
    ]
    assert same_bits(fp8_cpu.gemm(*padded), fp8_cpu.gemm(a, b))


FP32, BF16 = torch.float32, torch.bfloat16


def single_product(a, b):
    return torch.from_numpy(fp8_product(a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_rounded_once_and_added_in_fp32(kind):
    a, b = operands(kind, 9, 130, 384, (E5M2, E4M3))
    total, there = single_product(a, b), torch.randn(9, 130)
    assert same_bits(fp8.gemm(a, b, torch.empty(9, 130)), total)
    assert same_bits(fp8.gemm(a, b, torch.empty(130, 9, dtype=BF16).t()), total.bfloat16())
    assert same_bits(fp8.gemm(a, b, there.clone(), add=True), there + total)


def test_a_nan_in_bf16_is_that_of_a_gpu():
    a, b = operands("tensor", 2, 3, 128, (E4M3, E4M3))
    a.data.view(torch.uint8)[1, 5] = 0x7F
    out = fp8.gemm(a, b, torch.empty(2, 3, dtype=BF16))
    assert out.view(torch.int16)[1].tolist() == [0x7FFF] * 3
    assert out[0].isfinite().all()


@pytest.mark.parametrize("segments", ((1024,), (512, 512), (512, 1024, 512)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_over_shards_is_the_tree_whatever_the_number_of_ranks(kind, segments):
    """Each shard of k is a product of its own; segments are added in order, then shards."""
    shards, k = 4, sum(segments)
    a, b = operands(kind, 5, 133, k, (E4M3, E4M3))
    terms, before = torch.zeros(shards, 5, 133), 0
    for number, segment in enumerate(segments):
        for shard in range(shards):
            piece = before + shard * segment // shards, segment // shards
            single = single_product(a.along_k(*piece), b.along_k(*piece))
            terms[shard] = single if number == 0 else terms[shard] + single
        before += segment
    whole = tree_sum(terms, FP32)
    assert same_bits(tree_sum(fp8.nodes(a, b, VirtualMesh(shards, 1, 0), segments), FP32), whole)
    results = []
    for rank in range(2):  # each of two ranks has half of every segment
        k_of_rank, start = [], 0
        for segment in segments:
            k_of_rank.append(torch.arange(segment // 2) + start + rank * (segment // 2))
            start += segment
        k = torch.cat(k_of_rank)
        mine = [_of_k(x, k) for x in (a, b)]
        halves = tuple(segment // 2 for segment in segments)
        nodes = fp8.nodes(*mine, VirtualMesh(shards, 2, rank), halves)
        results.append(tree_sum(nodes, FP32))
    assert same_bits(results[0] + results[1], whole)
    assert not same_bits(single_product(a, b), whole)  # the control: one product over all of k


def _of_k(x, k):
    scale = x.scale if x.blocks == "tensor" else x.scale[:, k[::BLOCK] // BLOCK]
    return Quantized(x.data.view(torch.uint8)[:, k].view(x.data.dtype), scale, x.blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_products_of_their_rows(kind):
    sizes, n = (3, 0, 66, 1), 140
    groups = Groups(sizes, torch.tensor(sizes))
    x, _ = operands(kind, 70, 1, 256, (E4M3, E4M3))
    weights = [operands(kind, 1, n, 256, (E4M3, E4M3), seed=seed)[1] for seed in range(4)]
    scales = torch.rand(4) + 0.5
    if kind == "tensor":
        x = Quantized(x.data, scales)
    out = torch.empty(70, n, dtype=BF16)
    fp8.grouped_gemm(x, weights, out, groups)
    start = 0
    for size, weight, scale in zip(sizes, weights, scales, strict=True):
        rows = (Quantized(x.data, scale) if kind == "tensor" else x).of_rows(start, size)
        assert same_bits(out[start : start + size], single_product(rows, weight).bfloat16())
        start += size


@pytest.mark.parametrize("kind", ("tensor", "1x128"))
@pytest.mark.parametrize("chain", ((0,), (0, 1), (1, 0)))
def test_weight_gradients_of_experts_are_added_partial_by_partial_in_order(kind, chain):
    sizes = (128, 128, 0, 256) if kind == "1x128" else (5, 40, 0, 130)
    dy, x = operands(kind, 9, 33, sum(sizes), (E5M2, E4M3))
    if kind == "tensor":
        dy, x = (Quantized(item.data, torch.rand(4) + 0.5) for item in (dy, x))
    there = torch.randn(4 // len(chain), 9, 33)
    outs, starts = [item.clone() for item in there], [0, *accumulate(sizes)]
    fp8.grouped_weight_gradient(dy, x, outs, Groups(sizes, torch.tensor(sizes)), chain)
    for i, expected in enumerate(there):
        for g in (i * len(chain) + link for link in chain):
            if sizes[g]:
                mine = [Quantized(item.data, item.scale[g]) if kind == "tensor" else item for item in (dy, x)]
                expected = expected + single_product(*(item.along_k(starts[g], sizes[g]) for item in mine))
        assert same_bits(outs[i], expected)


# --- refusals ---


def quantized(rows, k, blocks, dtype=E4M3):
    shape = {"tensor": (), "1x128": (rows, -(-k // BLOCK)), "128x128": (-(-rows // BLOCK), -(-k // BLOCK))}[blocks]
    return Quantized(torch.zeros(rows, k).to(dtype), torch.ones(shape), blocks)


REFUSED = {
    "two e5m2": (
        quantized(2, 128, "tensor", E5M2), quantized(3, 128, "tensor", E5M2), (FP32, False), "one must be e4m3",
    ),
    "two 2D": (quantized(2, 128, "128x128"), quantized(3, 128, "128x128"), (FP32, False), "1x128 by 128x128"),
    "mixed": (quantized(2, 128, "tensor"), quantized(3, 128, "1x128"), (FP32, False), "FP8 scales of tensor by 1x128"),
    "k": (quantized(2, 128, "tensor"), quantized(3, 64, "tensor"), (FP32, False), "[2, 128] and [3, 64]^T"),
    "out": (quantized(2, 128, "tensor"), quantized(4, 128, "tensor"), (FP32, False), "is not [2, 3]"),
    "add": (quantized(2, 128, "tensor"), quantized(3, 128, "tensor"), (BF16, True), "fp32, or bf16 without add"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_definition_is_refused(what):
    a, b, (dtype, add), message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        fp8.gemm(a, b, torch.empty(2, 3, dtype=dtype), add=add)


def test_what_is_no_quantized_matrix_is_refused():
    data = torch.zeros(4, 256).to(E4M3)
    for wrong, message in (
        (lambda: Quantized(data.float(), torch.ones(())), "FP8 numbers of torch.float32"),
        (lambda: Quantized(data, torch.ones((), dtype=BF16)), "scales of torch.bfloat16"),
        (lambda: Quantized(data.t(), torch.ones(())), "not contiguous"),
        (lambda: Quantized(data, torch.ones(4, 3), "1x128"), "scales [4, 3] of 1x128 for [4, 256]; [4, 2]"),
        (lambda: quantized(4, 256, "1x128").along_k(64, 128), "128 of k from 64 split blocks of 128"),
        (lambda: quantized(4, 256, "1x128").along_k(0, 64), "64 of k from 0 split blocks of 128"),
        (lambda: quantized(256, 256, "128x128").of_rows(64, 128), "128 rows from 64 split blocks of 128"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            wrong()


# --- the trial ---


def by(gemm):
    """A product of numpy as the trial calls it."""

    def compute(a, b, out, add):
        total = gemm(a, b)
        total = torch.from_numpy(total) if isinstance(total, np.ndarray) else total
        out.copy_(out + total if add else rounded(total) if out.dtype == BF16 else total)

    return compute


def split_k(a, b):
    """Two halves of k by themselves, then their sum, as cuBLAS does where the output is small."""
    k = a.data.shape[1] // (2 * BLOCK) * BLOCK
    first, second = ([x.along_k(*part) for x in (a, b)] for part in ((0, k), (k, a.data.shape[1] - k)))
    with np.errstate(invalid="ignore"):
        return fp8_product(*first) + fp8_product(*second)


OTHER = OTHER_SUM | {"k split": (split_k, KINDS)}


# bf16 hides most: it has all of them, the other forms one.
@pytest.mark.parametrize(
    "what, form",
    (*((what, (BF16, False)) for what in OTHER), *(("12 bits", (FP32, add)) for add in (False, True))),
    ids=str,
)
def test_the_trial_reveals_other_arithmetic(what, form):
    other, kinds = OTHER[what]
    dtype, add = form
    for kind in kinds:
        a, b = operands(kind, 16, 16, 1024, TYPES[0])
        out = torch.zeros(16, 16, dtype=dtype)
        assert not fp8_cublas.agree(by(other), by(fp8_product), a, b, out, add), kind


@pytest.mark.parametrize("kind, types", zip(KINDS, TYPES, strict=True), ids=str)
def test_the_trial_lets_the_definition_pass(kind, types):
    def compute(x, y, out, add):
        fp8.gemm(x, y, out, add=add)

    for dtype, add in ((FP32, False), (BF16, False), (FP32, True)):
        a, b = operands(kind, 8, 144, 384, types)
        bits = [x.data.view(torch.uint8).clone() for x in (a, b)]
        out = torch.full((8, 144), 3.0, dtype=dtype)
        assert fp8_cublas.agree(compute, by(fp8_product), a, b, out, add)
        assert (out == 3).all()
        assert [torch.equal(x.data.view(torch.uint8), before) for x, before in zip((a, b), bits, strict=True)] == [
            True
        ] * 2


def test_a_layout_that_cublas_does_not_take_is_none():
    def refusing(message):
        def gemm(a, b, out, add):
            raise RuntimeError(message)

        return gemm

    a, b = operands("tensor", 16, 16, 128, TYPES[0])
    for message in ("CUBLAS_STATUS_NOT_SUPPORTED", "Unable to find any suitable algorithms"):
        assert not fp8_cublas.agree(refusing(message), by(fp8_product), a, b, torch.empty(16, 16), False)
    with pytest.raises(RuntimeError, match="out of memory"):
        fp8_cublas.agree(refusing("out of memory"), by(fp8_product), a, b, torch.empty(16, 16), False)


def test_what_cublas_takes(monkeypatch):
    monkeypatch.setattr(fp8_cublas, "installed", lambda distribution: "2.0")

    def suits(kind, m, n, k, types=TYPES[0], dtype=FP32, add=False):
        a, b = operands(kind, m, n, k, types)
        return bool(fp8_cublas.suits(a, b, torch.empty(m, n, dtype=dtype), add))

    assert all(suits(kind, 16, 32, 256, add=add) for kind in KINDS for add in (False, True))
    assert suits("tensor", 17, 32, 48)
    assert not suits("tensor", 16, 32, 40)
    assert not suits("tensor", 16, 20, 64)
    assert not suits("1x128", 17, 32, 256)
    assert not suits("1x128", 16, 32, 160)
    assert suits("1x128", 16, 32, 256, TYPES[1])
    monkeypatch.setattr(fp8_cublas, "installed", lambda distribution: None)
    assert suits("1x128", 16, 32, 256)
    assert not suits("1x128", 16, 32, 256, TYPES[1])
    assert suits("tensor", 16, 32, 256, TYPES[1])
    assert not suits("tensor", 16, 32, 256, add=True)
