# SPDX-License-Identifier: Apache-2.0
"""The sum of a tensor core: its definition against bits that an H200 gave, the compiled form against the definition.

Our sum against models of GPUs by others: MMA-Sim (arXiv 2511.10909, MIT licence), which they validated on hardware.

Every bit that its models of Hopper and Blackwell give is compared. Its model of Ampere is the control, which differs.
In FP8 Hopper is compared, and Blackwell differs.

Single steps of seven cards, recorded by others (tests/data/README.md): the definitions and the compiled loops."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from safetensors.numpy import load_file

from tests.definitions import fp8_sum, tensor_core_sum
from tests.definitions.tensor_core_sum import INFINITY, NAN, STEP, bf16_product, fp32_product
from tests.operands import EVERY_BF16, KINDS, same_bits, sample, threads
from tp_invariant_recipes.kernels.cpu import fp8_cpu, numba_loop, tensor_core_cpu, tensor_core_vector
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized
from tp_invariant_recipes.portable import conformance, definition

DATA = Path(__file__).parents[3] / "data"
NUMBERS = np.load(DATA / "tensor_core_h200.npz")
SMALLEST = np.load(DATA / "smallest_products_h100.npz")  # sums of products near 2^-150
EDGES = load_file(conformance.BUILT_IN)
PLAIN = sorted(name[2:] for name in NUMBERS.files if name.startswith("a_"))
BF16_EDGES, FP32_EDGES = (
    sorted({name.split("/")[1] for name in EDGES if name.startswith(kind)}) for kind in ("bf16/", "fp32/")
)


def edge(kind, case):
    return (EDGES[f"{kind}/{case}/{part}"] for part in "abc")


def bf16(bits):
    return torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)


def fp32(bits):
    return torch.from_numpy(bits.view(np.float32).copy())


def result_bits(result):
    return result.numpy().view(np.uint32)


def canonical(bits):
    """FMA units keep a NaN's sign and payload, the definition does not."""
    return np.where(np.isnan(bits.view(np.float32)), np.uint32(NAN), bits)


@pytest.mark.parametrize("case", PLAIN)
def test_the_definition_and_the_compiled_sum_give_the_bits_of_an_h200(case):
    a, b = NUMBERS[f"a_{case}"], NUMBERS[f"b_{case}"]
    rows = slice(0, 8) if a.shape[1] > 512 else slice(None)  # the definition keeps every term in memory
    actual = bf16_product(a[rows], b)
    recorded = [name for name in NUMBERS.files if name.startswith(f"c_{case}_")]
    assert len(recorded) >= 2
    for name in recorded:
        assert (actual == NUMBERS[name][rows]).all(), name
    assert (result_bits(tensor_core_cpu.gemm(bf16(a), bf16(b))) == NUMBERS[f"c_{case}_mmawg"]).all()


@pytest.mark.parametrize("case", BF16_EDGES)
def test_both_give_the_bits_of_an_h200_at_the_edges(case):
    a, b, expected = edge("bf16", case)
    assert (bf16_product(a, b) == expected).all()
    assert (result_bits(tensor_core_cpu.gemm(bf16(a), bf16(b))) == expected).all()


@pytest.mark.parametrize("case", FP32_EDGES)
def test_a_product_of_fp32_is_a_chain_of_fma(case):
    a, b, expected = edge("fp32", case)
    assert (fp32_product(a.view(np.float32), b.view(np.float32)) == canonical(expected)).all()
    assert (result_bits(tensor_core_cpu.gemm(fp32(a), fp32(b))) == canonical(expected)).all()


def least(exponent, factors):
    """Bits of operands of one output: the products of these pairs of whole numbers, times 2 ** exponent."""
    a, b = torch.zeros(1, 16), torch.zeros(16, 1)
    for place, (x, y) in enumerate(factors):
        a[0, place], b[place, 0] = x * 2.0 ** (exponent // 2), y * 2.0 ** (exponent - exponent // 2)
    return [x.bfloat16().view(torch.int16).numpy().view(np.uint16) for x in (a, b)]


# Products that add up to 2^-149, the smallest fp32 number, and are far below LEAST_TOP: its unit is 2^-158. Whole units
# are kept; halves of one are cut, and the sum is zero. MMA-Sim's models of Hopper and Blackwell give these bits too.
WHOLE_UNITS, HALF_UNITS = least(-158, ((7, 73), (1, 1))), least(-159, ((33, 31), (1, 1)))


@pytest.mark.parametrize("operands, bits", ((WHOLE_UNITS, 1), (HALF_UNITS, 0)), ids=("whole", "halves"))
def test_the_smallest_products_are_cut_at_the_least_top(operands, bits):
    assert bf16_product(*operands).tolist() == [[bits]]
    assert result_bits(tensor_core_cpu.gemm(*map(bf16, operands))).tolist() == [[bits]]


def test_the_smallest_products_have_the_bits_of_an_h100():
    actual = bf16_product(SMALLEST["a"], SMALLEST["b"])
    compiled = result_bits(tensor_core_cpu.gemm(bf16(SMALLEST["a"]), bf16(SMALLEST["b"])))
    recorded = [name for name in SMALLEST.files if name.startswith("c_")]
    assert len(recorded) == 4
    for name in recorded:
        assert (actual == SMALLEST[name]).all(), name
        assert (compiled == SMALLEST[name]).all(), name


@pytest.mark.parametrize("other", ({"kept": 24}, {"kept": 26}, {"step": 8}, {"step": 32}), ids=str)
def test_other_arithmetic_gives_other_bits(other):
    a, b = NUMBERS["a_512_cancel"][:16], NUMBERS["b_512_cancel"]
    assert (bf16_product(a, b, **other) != NUMBERS["c_512_cancel_mmawg"][:16]).any()


@pytest.mark.parametrize(
    "m, k, n, scale", ((1, 1, 1, 0), (3, 5, 7, 12), (64, 33, 129, 60), (2, 0, 3, 0), (130, 160, 96, 12))
)
def test_the_compiled_sum_is_the_definition(m, k, n, scale):
    generator = torch.Generator().manual_seed(k)

    def drawn(*size):
        exponents = torch.randint(-scale, scale + 1, size, generator=generator)
        return torch.ldexp(torch.randn(size, generator=generator), exponents).bfloat16()

    a, b = drawn(m, k), drawn(k, n)
    numbers = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    assert (result_bits(tensor_core_cpu.gemm(a, b)) == bf16_product(*numbers)).all()


# Fields of bf16 exponents: of zeros and subnormals, of the borders of the vectors' bytes and scales, up to NaN.
MOST = tensor_core_vector.MOST_FAST + 127
FIELDS = (0, 1, 2, 13, 14, 62, 63, 64, 76, 77, 78, 103, 126, 127, 128, MOST - 1, MOST, MOST + 1, 254, 255)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_compiled_sum_is_the_definition_for_all_exponents(data):
    """Rows and columns draw their fields from few, so that sums of two meet every border; or all are almost 2."""
    fields = [data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)) for _ in "ab"]
    fractions = data.draw(st.sampled_from((128, 1, 2)))  # all, none, the two largest
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def drawn(dtype, *shape):
        signs = generator.integers(0, 2, shape) if fractions == 128 else 0
        low = generator.integers(128 - fractions if fractions == 2 else 0, 128 if fractions > 1 else 1, shape)
        return (signs << 15 | generator.choice(dtype, shape) << 7 | low).astype(np.uint16)

    k = data.draw(st.sampled_from((16, 33)))
    a, b = drawn(fields[0], 5, k), drawn(fields[1], k, 70)
    assert (result_bits(tensor_core_cpu.gemm(bf16(a), bf16(b))) == bf16_product(a, b)).all()


NEARLY_2, NEARLY_1 = 2 - 2**-7, 1 + 2**-7
BORDERS = {  # pairs of numbers whose products are added
    "a zero beside 2^60, and products of 2^-80": [(0, 2.0**60), (NEARLY_1 * 2**-50, NEARLY_1 * 2**-30)],
    "a sum beyond 32 bits": [(1, NEARLY_2), *[(0, 0)] * 15, *[(NEARLY_2, NEARLY_2)] * 16],
    "a sum just within": [(1, 1), *[(0, 0)] * 15, *[(NEARLY_2, 1.9375)] * 16],
}


@pytest.mark.parametrize("pairs", BORDERS.values(), ids=BORDERS)
def test_the_compiled_sum_is_the_definition_at_the_borders(pairs):
    a, b = torch.tensor(pairs, dtype=torch.bfloat16).t()
    numbers = [x.view(torch.int16).numpy().view(np.uint16) for x in (a.expand(3, -1).contiguous(), b[:, None])]
    assert (result_bits(tensor_core_cpu.gemm(a.expand(3, -1), b[:, None])) == bf16_product(*numbers)).all()


@pytest.mark.parametrize("any_processor", (True, False))
def test_a_step_has_the_bits_of_the_definition_whatever_cuts_it(monkeypatch, any_processor):
    """What AVX-512 does at once other processors do in turn; a vector's step is compiled for both here."""
    if any_processor:
        monkeypatch.setattr(tensor_core_vector, "_avx512", lambda context: False)

    @njit(**numba_loop.OPTIONS)
    def by_vectors(row, a, ea, b, eb, kept):
        return [tensor_core_vector.step(row, a, ea, b, eb, 0, k, k, 0, kept) for k in range(0, a.shape[1], 16)]

    a, b = NUMBERS["a_512_cancel"][:1], NUMBERS["b_512_cancel"][:, : tensor_core_vector.LANES]
    row = np.zeros(tensor_core_cpu.WIDE, np.float32)
    rows, panels = tensor_core_cpu.split_rows(a), tensor_core_cpu.split_panels(b)
    remaining = by_vectors(row, *rows[:2], *(part[0] for part in panels[:2]), np.int32(tensor_core_sum.KEPT_BITS))
    assert not any(remaining)
    assert (row[: b.shape[1]].view(np.uint32) == bf16_product(a, b)[0]).all()
    assert not (any_processor and "avx512" in by_vectors.inspect_llvm(by_vectors.signatures[0]))


@pytest.mark.parametrize("columns_first", (False, True))
def test_parts_of_rows_and_of_the_sum_change_no_bit(columns_first):
    """More rows than share a split panel, and columns in several parts, with what a later part has to know."""
    generator = torch.Generator().manual_seed(0)
    m, k, n = tensor_core_cpu.ROWS + 2, 2 * tensor_core_cpu.DEPTH + 21, tensor_core_cpu.WIDE + 9
    a, b = torch.randn(m, k, generator=generator).bfloat16(), torch.randn(k, n, generator=generator).bfloat16()
    a[1, 5], a[2, 7], a[3, 9], b[300, 3] = torch.inf, torch.nan, 2.0**100, 2.0**-90
    b[: tensor_core_cpu.DEPTH + 3, 4] = 0.0
    rows = [0, 1, 2, 3, m - 1]
    expected = bf16_product(*(x.view(torch.int16).numpy().view(np.uint16) for x in (a[rows], b)))
    b = b.t().contiguous().t() if columns_first else b
    assert (result_bits(tensor_core_cpu.gemm(a, b)[rows]) == expected).all()
    onto = torch.randn(m, n, generator=generator)
    wanted = tensor_core_cpu.gemm(a, b) + onto
    assert tensor_core_cpu.gemm(a, b, onto=onto) is onto
    assert same_bits(onto.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_neither_strides_nor_neighbours_nor_threads_change_a_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(130, 200, generator=generator).to(dtype), torch.randn(200, 196, generator=generator).to(dtype)
    whole = tensor_core_cpu.gemm(a, b)
    assert tensor_core_cpu.SMALL < 130 * 200 * 196
    for count in (1, 3):
        with threads(count):
            assert same_bits(tensor_core_cpu.gemm(a, b), whole)
    assert same_bits(tensor_core_cpu.gemm(a.t().contiguous().t(), b.t().contiguous().t()), whole)
    assert same_bits(tensor_core_cpu.gemm(a[7:9], b[:, 5:6]), whole[7:9, 5:6].contiguous())


@pytest.mark.parametrize("special", (torch.inf, -torch.inf, torch.nan))
@pytest.mark.parametrize("in_a", (True, False))
def test_a_special_number_meets_a_step_of_zeros_only(special, in_a):
    """No number of the step's other operand tells how large the product is."""
    a, b = torch.zeros(3, 32), torch.zeros(32, 70)
    a[:, 16:], b[16:] = 1, 1  # after it, steps that are ordinary
    (a[1] if in_a else b[:, 66])[3] = special
    a, b = a.bfloat16(), b.bfloat16()
    result = result_bits(tensor_core_cpu.gemm(a, b))
    assert (result == bf16_product(*map(tensor_core_cpu.bits_of, (a, b)))).all()
    assert (result == NAN).sum() == (70 if in_a else 3)


def test_a_nan_and_an_infinity_reach_their_row_and_column_only():
    a, b = torch.ones(40, 32).bfloat16(), torch.ones(32, 40).bfloat16()
    clean = tensor_core_cpu.gemm(a, b)
    a[3, 5], b[9, 7] = float("inf"), float("nan")
    dirty = tensor_core_cpu.gemm(a, b)
    assert torch.isinf(dirty[3]).sum() == 39
    assert torch.isnan(dirty[:, 7]).all()
    dirty[3], dirty[:, 7] = clean[3], clean[:, 7]
    assert same_bits(dirty, clean)


def test_a_bf16_output_is_rounded_to_nearest_even():
    total = fp32(np.array([0x3F808000, 0x3F818000, 0x3F808001, NAN, 0xFFC00000, INFINITY], np.uint32))
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7FFF, 0x7FFF, 0x7F80]
    assert tensor_core_cpu.rounded(total).view(torch.int16).tolist() == expected


@pytest.mark.parametrize("dtypes", ((torch.float16, torch.float16), (torch.bfloat16, torch.float32)), ids=str)
def test_other_dtypes_are_refused(dtypes):
    with pytest.raises(TypeError, match="both must be bf16, or both fp32"):
        tensor_core_cpu.gemm(torch.ones(2, 2, dtype=dtypes[0]), torch.ones(2, 2, dtype=dtypes[1]))


# The class of each model, the architecture, the instruction and its m and n.
MODELS = {
    "Hopper mma": ("MMA", "Hopper", "m16n8k16.f32.bf16.bf16.f32", 16, 8),
    "Hopper wgmma": ("WGMMA", "Hopper", "m64n8k16.f32.bf16.bf16", 64, 8),
    "Blackwell tcgen05": ("TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.f32.bf16.bf16", 64, 8),
}
AMPERE_MODEL = ("MMA", "Ampere", "m16n8k16.f32.bf16.bf16.f32", 16, 8)


@pytest.fixture(scope="module")
def sim():
    """MMA-Sim's models, without its FMA of FP32 and FP64, which it compiles from C++ when it is imported."""
    with pytest.MonkeyPatch.context() as patched:
        name = "mmasim.arithmetic.fma"
        patched.setitem(sys.modules, name, ModuleType(name))
        yield importlib.import_module("mmasim.nv_ptx.sim")


def modelled(sim, model, a, b):
    """a @ b in steps of the model's instruction over k, from an accumulator of zeros. Bits of fp32, [m, n]."""
    kind, architecture, instruction, m, n = model
    step = getattr(sim, kind)(architecture, instruction)
    out = torch.zeros(a.shape[0], b.shape[1])
    for row in range(0, a.shape[0], m):
        for column in range(0, b.shape[1], n):
            place = slice(row, row + m), slice(column, column + n)
            for k in range(0, a.shape[1], STEP):
                out[place] = step(a[place[0], k : k + STEP], b[k : k + STEP, place[1]], out[place])
    return out.numpy().view(np.uint32)


def emulated(a, b):
    return tensor_core_cpu.gemm(a, b).numpy().view(np.uint32)


def bf16_operands(kind):
    """[64, 64] and [64, 8] bf16. "edges" has every magnitude, subnormal ones too, and results of each; products of
    "smallest" are near 2^-150, so that LEAST_TOP decides what is cut of them."""
    if kind == "smallest":
        return tuple(sample("normal", *shape, seed=shape[1]).mul_(2.0**-75).bfloat16() for shape in ((64, 64), (64, 8)))
    if kind != "edges":
        return sample(kind, 64, 64, dtype=torch.bfloat16), sample(kind, 64, 8, dtype=torch.bfloat16, seed=1)
    random = np.random.default_rng(0)
    finite = EVERY_BF16[np.isfinite(EVERY_BF16)]
    small = finite[np.abs(finite) < 2.0**-60]
    a, b = random.choice(finite, (64, 64)), random.choice(small, (64, 8))
    return torch.from_numpy(a).bfloat16(), torch.from_numpy(b).bfloat16()


@pytest.mark.parametrize("kind", (*KINDS, "edges", "smallest"))
@pytest.mark.parametrize("model", MODELS)
def test_the_definition_is_their_model(sim, model, kind):
    a, b = bf16_operands(kind)
    assert (emulated(a, b) == modelled(sim, MODELS[model], a, b)).all()


def test_their_ampere_is_our_sum_of_24_bits_in_steps_of_8(sim):
    """And so another sum."""
    a, b = bf16_operands("wide")
    words = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    ampere = modelled(sim, AMPERE_MODEL, a, b)
    assert (bf16_product(*words, kept=24, step=8) == ampere).all()
    assert (emulated(a, b) != ampere).any()


# --- FP8 ---

FP8_TYPES = {"e4m3": E4M3, "e5m2": E5M2}


def fp8_operands(kind, types):
    """a [64, 128] and b [8, 128]: any finite numbers; near one; a subnormal and b any; or with infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    operands = []
    for rows, dtype in zip((64, 8), types, strict=True):
        bits = torch.randint(0, 256, (rows, BLOCK), generator=generator)
        most = 0x7F if dtype == E4M3 else 0x7C  # the first that is not finite
        if kind == "subnormal" and rows == 64:
            most = 8 if dtype == E4M3 else 4
        if kind == "one":
            bits = (bits & 0x87) | 0x38
        elif kind != "special":
            bits = (bits & 0x80) | (bits & 0x7F) % most
        operands.append(bits.to(torch.uint8).view(dtype))
    return operands


@pytest.mark.parametrize("types", (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")), ids=str)
@pytest.mark.parametrize("kind", ("any", "one", "subnormal", "special"))
def test_a_block_of_fp8_is_four_of_their_instructions(sim, kind, types):
    a, b = fp8_operands(kind, [FP8_TYPES[name] for name in types])
    step, out = sim.WGMMA("Hopper", f"m64n8k32.f32.{types[0]}.{types[1]}"), torch.zeros(64, 8)
    for k in range(0, BLOCK, fp8_sum.STEP):
        out = step(a[:, k : k + fp8_sum.STEP], b[:, k : k + fp8_sum.STEP].t(), out)
    result, single = out.numpy().view(np.uint32), torch.ones(())
    operands = Quantized(a, single), Quantized(b, single)
    assert (fp8_cpu.gemm(*operands).numpy().view(np.uint32) == result).all()
    assert (fp8_sum.fp8_product(*operands).view(np.uint32) == result).all()


def test_their_blackwell_adds_fp8_otherwise(sim):
    a, b = fp8_operands("any", (E4M3, E4M3))
    step, out = sim.TCGen05MMA("Blackwell", "m64n8k32.kind::f8f6f4.f32.e4m3.e4m3"), torch.zeros(64, 8)
    for k in range(0, BLOCK, fp8_sum.STEP):
        out = step(a[:, k : k + fp8_sum.STEP], b[:, k : k + fp8_sum.STEP].t(), out)
    actual = fp8_sum.fp8_product(Quantized(a, torch.ones(())), Quantized(b, torch.ones(())))
    assert (actual.view(np.uint32) != out.numpy().view(np.uint32)).mean() > 0.5


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


def bf16_of(bits):
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def each(gemm, a, b):
    """[cases] bits of `product` of row i of a and row i of b."""
    return torch.diagonal(gemm(bf16_of(a), bf16_of(b).t())).contiguous().numpy().view(np.uint32)


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
