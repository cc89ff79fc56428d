"""The gradient norm: exact, and the same bits however the gradients are cut up, grouped and ordered."""

import inspect
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics import grad_norm
from tp_invariant_recipes.numerics.grad_norm import exact_grad_norm, get_grad_norm_fp32

MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
seeds = st.integers(0, 2**32)


def fp32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def pieces(flat: Tensor, generator: torch.Generator) -> list[Tensor]:
    """A tensor's elements in random order, cut at random places."""
    flat = flat[torch.randperm(len(flat), generator=generator)]
    cuts = torch.randint(0, len(flat) + 1, (5,), generator=generator).sort()[0]
    return list(torch.tensor_split(flat, cuts))


def spread(seed: int, count: int, width: float) -> tuple[Tensor, torch.Generator]:
    """Normal numbers times powers of two from 2^-width to 2^width."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, generator=generator) * 2 * width - width
    return torch.randn(count, generator=generator) * torch.exp2(scale.round()), generator


def nearest(result: float, values: list[float]) -> bool:
    """Whether no fp32 number is closer to the root of the sum of squares than `result`; no root is taken."""
    square = sum(Fraction(v) ** 2 for v in values)
    here = bits(result)
    below = (Fraction(fp32(here)) + Fraction(fp32(here - 1))) / 2 if here else Fraction(0)
    above = (Fraction(fp32(here)) + Fraction(fp32(here + 1))) / 2
    return below**2 <= square <= above**2


@given(seed=seeds, count=st.integers(1, 3000), width=st.sampled_from((0, 3, 40)), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_the_norm_has_one_value_for_all_shards_orders_and_buckets(seed, count, width, dtype):
    flat, generator = spread(seed, count, min(width, 10) if dtype == torch.float16 else width)
    flat = flat.to(dtype)
    whole = exact_grad_norm([flat])
    assert exact_grad_norm(pieces(flat, generator)) == whole
    assert exact_grad_norm(pieces(flat.float(), generator)) == whole
    assert exact_grad_norm([flat.repeat_interleave(2)[::2]]) == whole


def test_a_sum_of_floats_has_not():
    flat, _ = spread(0, 1 << 16, 3)
    sums = {sum((p * p).sum() for p in flat.chunk(n)).sqrt().item() for n in (1, 2, 4, 8, 16, 32)}
    assert len(sums) > 1


def test_chunks_do_not_show(monkeypatch):
    flat, _ = spread(1, 5000, 30)
    whole = exact_grad_norm([flat])
    for size in (1, 7, 4096):
        monkeypatch.setattr(grad_norm, "CHUNK", size)
        assert exact_grad_norm([flat]) == whole


@given(values=st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=30), exponent=st.integers(-140, 90))
@settings(max_examples=200, deadline=None)
def test_the_norm_is_the_nearest_fp32_to_the_exact_one(values, exponent):
    floats = torch.tensor([math.ldexp(v, exponent) for v in values], dtype=torch.float64).float()
    assert nearest(exact_grad_norm([floats]), floats.tolist())


@given(values=st.lists(finite, min_size=1, max_size=50))
@settings(max_examples=200, deadline=None)
def test_the_norm_is_within_an_ulp_of_fp64_at_all_magnitudes(values):
    reference = torch.tensor(values, dtype=torch.float64).square().sum().sqrt()
    assume(reference <= MAX)
    assert abs(bits(exact_grad_norm([torch.tensor(values)])) - bits(reference.float().item())) <= 1


@given(seed=seeds, width=st.sampled_from((0, 5, 20)))
@settings(max_examples=20, deadline=None)
def test_the_norm_of_many_is_within_an_ulp_of_fp64(seed, width):
    flat, _ = spread(seed, 1 << 16, width)
    assert abs(bits(exact_grad_norm([flat])) - bits(flat.double().norm().float().item())) <= 1


@pytest.mark.parametrize(
    "values, norm",
    (
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([3.0, -4.0], 5.0),
        ([TINY], TINY),
        ([TINY] * 9, 3 * TINY),
        ([-(2.0**-126), TINY], 2.0**-126),
        ([1e-38, 0.0], fp32(bits(1e-38))),
        ([MAX], MAX),
        ([MAX, MAX], math.inf),
        ([1.0] * 1000 + [1e-30] * 1000, fp32(bits(math.sqrt(1000)))),
        ([1.0, math.inf], math.inf),
        ([-math.inf], math.inf),
        ([1.0, math.nan], math.nan),
        ([-math.nan, math.inf], math.nan),
        ([MAX, -math.nan], math.nan),
    ),
)
def test_edges(values, norm):
    result = exact_grad_norm([torch.tensor(values, dtype=torch.float32)])
    assert result == norm or (math.isnan(result) and math.isnan(norm))


def test_no_gradients_at_all():
    assert exact_grad_norm([]) == 0.0
    assert exact_grad_norm([torch.empty(0, 3), torch.ones(4)]) == 2.0


def test_subnormals_count_even_where_the_cpu_flushes_them():
    values = torch.full((100,), 2.0**-140)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert exact_grad_norm([values]) == 10 * 2.0**-140
    finally:
        torch.set_flush_denormal(False)


def test_elements_too_small_for_the_scale_are_cut_alike_everywhere():
    flat = torch.cat((torch.ones(1), torch.full((1000,), 2.0**-50 * 1.7), torch.full((1000,), 2.0**-80)))
    generator = torch.Generator().manual_seed(3)
    assert {exact_grad_norm(pieces(flat, generator)) for _ in range(10)} == {exact_grad_norm([flat])} == {1.0}


def test_limbs_carry():
    # All bits of a 24-bit mantissa set, so that every limb is near its limit.
    value, count = 2.0 - 2.0**-23, 1 << 20
    assert exact_grad_norm([torch.full((count,), value)]) == value * 2.0**10


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="float64"):
        exact_grad_norm([torch.ones(2, dtype=torch.float64)])


@pytest.mark.parametrize("norm_type", (1, 3.0, math.inf))
def test_other_norms_are_refused(norm_type):
    with pytest.raises(ConfigError, match=f"norm_type={norm_type}"):
        get_grad_norm_fp32([torch.ones(2)], norm_type)


def test_the_signature_is_that_of_megatron():
    stock = pytest.importorskip("megatron.core.optimizer.clip_grads").get_grad_norm_fp32
    ours = inspect.signature(get_grad_norm_fp32).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in inspect.signature(stock).parameters.values()
    ]
