"""`fp8 tiles 1`: its definition against bits that cuBLAS gave on Hopper, the compiled form against both."""

from functools import partial

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
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.numerics.gemm import fp8


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
OTHER = {
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


@pytest.mark.parametrize("what", OTHER)
def test_other_arithmetic_has_other_bits(what):
    gemm, kinds = OTHER[what]
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
