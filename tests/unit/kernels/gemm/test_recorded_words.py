"""Single steps of seven cards, recorded by others (tests/data/README.md): the definitions and the compiled loops."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.definitions import fp8_sum, tensor_core_sum
from tp_invariant_recipes.kernels.cpu import fp8_cpu, tensor_core_cpu
from tp_invariant_recipes.kernels.gemm.quantize import E4M3, E5M2, Quantized
from tp_invariant_recipes.portable import definition

WORDS = np.load(Path(__file__).parents[3] / "data" / "words_of_seven_cards.npz")
HOPPER, RECORDED, AMPERE = ("H100", "H200"), ("B200", "H100", "H200"), ("A100", "A2", "Ada", "L40S")
FP8 = tuple((card, kind) for card in (*HOPPER, "Ada", "L40S") for kind in ("e4m3", "e5m2"))
TYPES = {"e4m3": E4M3, "e5m2": E5M2}


def words(card, kind="bf16"):
    return (WORDS[f"{card}/{kind}/{part}"] for part in "abcd")


def defined(a, b, c, kept, step):
    """[cases] bits of a·b + c, a step at a time. a, b: [cases, k] words of bf16."""
    padding = ((0, 0), (0, -a.shape[1] % step))
    a, b, total = np.pad(a, padding), np.pad(b, padding), c[:, None]
    for start in range(0, a.shape[1], step):
        part = slice(start, start + step)
        total = tensor_core_sum._step(a[:, part, None], b[:, part, None], total, kept)
    return total[:, 0]


def behind(a, b, c):
    """Operands [cases, 32] of a·b + c: a first step adds c's three parts of 8 bits, which is exact, to zero."""
    parts, rest = [], c.view(np.float32).copy()
    for _ in range(3):
        parts.append(rest.view(np.uint32) & 0xFFFF0000)
        rest = rest - parts[-1].view(np.float32)
    assert (rest == 0).all()
    first, second = np.zeros((2, len(a), 16), np.uint16)
    first[:, :3], second[:, :3] = np.stack(parts, 1) >> 16, 0x3F80
    wide = ((0, 0), (0, 16 - a.shape[1]))
    return np.hstack([first, np.pad(a, wide)]), np.hstack([second, np.pad(b, wide)])


def bf16(bits):
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def each(gemm, a, b):
    """[cases] bits of `product` of row i of a and row i of b."""
    return torch.diagonal(gemm(bf16(a), bf16(b).t())).contiguous().numpy().view(np.uint32)


def exactly(a, b, c, kept):
    """[cases] bits by the loop over integers, which takes what vectors leave out."""
    a, b = (np.pad(x, ((0, 0), (0, 16 - x.shape[1]))) for x in (a, b))
    a, columns, c = a.astype(np.uint32) << 16, np.ascontiguousarray(b.astype(np.uint32).T) << 16, c.view(np.int32)
    step = tensor_core_cpu._exact_step
    bits = [step(a[i], 0, columns, i, 0, c[i], np.int32(kept)) for i in range(len(a))]
    return np.array(bits, np.int64).astype(np.uint32)


@pytest.mark.parametrize("card", RECORDED)
def test_the_definition_gives_every_word_of_hopper_and_blackwell(card):
    """And other sums do not."""
    a, b, c, d = words(card)
    assert (defined(a, b, c, 25, 16) == d).all()
    assert (each(tensor_core_cpu.gemm, *behind(a, b, c)) == d).all()
    assert (exactly(a, b, c, 25) == d).all()
    for kept, step in ((24, 16), (26, 16), (25, 8)):
        assert (defined(a, b, c, kept, step) != d).sum() >= 50
    assert (exactly(a, b, c, 24) != d).sum() >= 50


@pytest.mark.parametrize("card", AMPERE)
def test_ampere_and_ada_keep_24_bits(card):
    a, b, c, d = words(card)
    assert a.shape[1] == 8
    assert (defined(a, b, c, 24, 8) == d).all()
    assert (exactly(a, b, c, 24) == d).all()
    assert (each(definition.ampere, *behind(a, b, c)) == d).all()
    assert (defined(a, b, c, 25, 8) != d).sum() >= 50
    assert (each(tensor_core_cpu.gemm, *behind(a, b, c)) != d).sum() >= 50
    assert (defined(a, b, c, 24, 4) != d).sum() >= 50


def defined_fp8(card, kind, kept, step):
    """[cases] bits. On Hopper the recorded c counts as zero, on others it is the accumulator."""
    a, b, c, _ = words(card, kind)
    (x, ex), (y, ey) = (fp8_sum._split(torch.from_numpy(part).view(TYPES[kind])) for part in (a, b))
    total = np.zeros((len(a), 1)) if card in HOPPER else c.view(np.float32).astype(np.float64)[:, None]
    for start in range(0, a.shape[1], step):
        part = slice(start, start + step)
        total = fp8_sum._step(total, x[:, None, part], y[:, None, part], (ex + ey)[:, None, part], kept)
    return total.astype(np.float32).view(np.uint32)[:, 0]


@pytest.mark.parametrize("card, kind", FP8)
def test_fp8_keeps_13_bits_of_32_products_on_hopper_and_of_16_on_ada(card, kind):
    step = 32 if card in HOPPER else 16
    *_, d = words(card, kind)
    assert (defined_fp8(card, kind, 13, step) == d).all()
    for kept, other in ((13, 48 - step), (12, step), (14, step)):
        assert (defined_fp8(card, kind, kept, other) != d).sum() >= 15, (kept, other)


@pytest.mark.parametrize("card", HOPPER)
def test_the_compiled_fp8_sum_gives_every_word_of_hopper(card):
    a, b, _, d = words(card, "e4m3")
    single = torch.ones(1)
    operands = (Quantized(torch.from_numpy(x).view(E4M3), single, "tensor") for x in (a, b))
    assert (torch.diagonal(fp8_cpu.gemm(*operands)).contiguous().numpy().view(np.uint32) == d).all()


def test_fp8_words_of_a_b200_are_correctly_rounded_sums_and_no_published_model():
    """25 kept bits and a sum cut to fp32, as MMA-Sim models tcgen05, give other bits; so does Hopper's sum."""
    a, b, c, d = words("B200", "e4m3")
    x, y = (torch.from_numpy(part).view(E4M3).double().numpy() for part in (a, b))
    exact = (x * y).sum(1) + c.view(np.float32)  # fp64 holds it: operands near one
    assert (exact.astype(np.float32).view(np.uint32) == d).all()
    total = defined_fp8("B200", "e4m3", 25, 32)
    assert (total != d).sum() >= 10
    assert (defined_fp8("B200", "e4m3", 13, 32) != d).sum() >= 90
