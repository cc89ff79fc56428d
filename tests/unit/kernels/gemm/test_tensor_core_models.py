"""Our sum against models of GPUs by others: MMA-Sim (arXiv 2511.10909, MIT licence), which they validated on hardware.

Every bit that its models of Hopper and Blackwell give is compared. Its model of Ampere is the control, which differs.
In FP8 Hopper is compared, and Blackwell differs.
"""

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.definitions import fp8_sum
from tests.definitions.tensor_core_sum import STEP, bf16_product
from tests.operands import EVERY_BF16, KINDS, sample
from tp_invariant_recipes.kernels.cpu import fp8_cpu, tensor_core_cpu
from tp_invariant_recipes.kernels.gemm.quantize import BLOCK, E4M3, E5M2, Quantized

# The class of each model, the architecture, the instruction and its m and n.
MODELS = {
    "Hopper mma": ("MMA", "Hopper", "m16n8k16.f32.bf16.bf16.f32", 16, 8),
    "Hopper wgmma": ("WGMMA", "Hopper", "m64n8k16.f32.bf16.bf16", 64, 8),
    "Blackwell tcgen05": ("TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.f32.bf16.bf16", 64, 8),
}
AMPERE = ("MMA", "Ampere", "m16n8k16.f32.bf16.bf16.f32", 16, 8)


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
    ampere = modelled(sim, AMPERE, a, b)
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
