"""FP8 products of shards, tokens and experts on a CPU, their refusals, and the trial that lets cuBLAS compute them."""

import re
from itertools import accumulate

import numpy as np
import pytest
import torch

from tests.definitions.fp8_sum import fp8_product
from tests.fp8_operands import KINDS, TYPES, operands
from tests.operands import same_bits
from tests.unit.kernels.gemm import test_fp8_sum
from tp_invariant_recipes.kernels.cpu.tensor_core_cpu import rounded
from tp_invariant_recipes.kernels.gemm.grouped_gemm import Groups
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.gemm import fp8, fp8_cublas
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.numerics.sums.tree import tree_sum

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


OTHER = test_fp8_sum.OTHER | {"k split": (split_k, KINDS)}


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
    monkeypatch.setattr(fp8_cublas, "_installed", lambda: True)

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
    monkeypatch.setattr(fp8_cublas, "_installed", lambda: False)
    assert suits("1x128", 16, 32, 256)
    assert not suits("1x128", 16, 32, 256, TYPES[1])
    assert suits("tensor", 16, 32, 256, TYPES[1])
    assert not suits("tensor", 16, 32, 256, add=True)
