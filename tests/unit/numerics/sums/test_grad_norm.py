# SPDX-License-Identifier: Apache-2.0
"""The gradient norm: exact, and the same bits however the gradients are cut up, grouped and ordered. Megatron's step
collects the gradients to clip before it waits for the norm, and its caller gets a number.
"""

import inspect
import math
import struct
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels import grad_norm as kernels
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums import grad_norm
from tp_invariant_recipes.numerics.sums.grad_norm import (
    PendingNorm,
    clip_by_powers_of_two,
    exact_grad_norm,
    fp64_grad_norm,
    get_grad_norm_fp32,
    pending,
    reading_late,
    rounded_down_to_power_of_two,
)

MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
seeds = st.integers(0, 2**32)
EXAMPLES = 2 * settings.default.max_examples


def fp32_of_bits(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of_float(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def random_pieces(flat: Tensor, generator: torch.Generator) -> list[Tensor]:
    """A tensor's elements in random order, cut at random places."""
    flat = flat[torch.randperm(len(flat), generator=generator)]
    cuts = torch.randint(0, len(flat) + 1, (5,), generator=generator).sort()[0]
    return list(torch.tensor_split(flat, cuts))


def spread_values(seed: int, count: int, width: float) -> tuple[Tensor, torch.Generator]:
    """Normal numbers times powers of two from 2^-width to 2^width."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, generator=generator) * 2 * width - width
    return torch.randn(count, generator=generator) * torch.exp2(scale.round()), generator


def place(value: float) -> int:
    """x of value = m · 2^x, from its bits."""
    return max(bits_of_float(value) >> 23 & 255, 1) - 150


def counted(values: list[float]) -> Fraction:
    """The sum of squares that the norm is the root of, straight from the definition."""
    unit = 2 * max(map(place, values)) - 14
    return sum(math.floor(Fraction(v) ** 2 / Fraction(2) ** unit) for v in values) * Fraction(2) ** unit


def nearest(result: float, square: Fraction) -> bool:
    """Whether no fp32 number is closer to the root of `square` than `result`; no root is taken."""
    here = bits_of_float(result)
    below = (Fraction(fp32_of_bits(here)) + Fraction(fp32_of_bits(here - 1))) / 2 if here else Fraction(0)
    above = (
        Fraction(fp32_of_bits(here)) + Fraction(fp32_of_bits(here + 1) if here < bits_of_float(MAX) else 2**128)
    ) / 2
    return below**2 <= square <= above**2


@given(seed=seeds, count=st.integers(1, 3000), width=st.sampled_from((0, 3, 40)), dtype=st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_the_norm_has_one_value_for_all_shards_orders_and_buckets(seed, count, width, dtype):
    flat, generator = spread_values(seed, count, min(width, 10) if dtype == torch.float16 else width)
    flat = flat.to(dtype)
    whole = exact_grad_norm([flat])
    assert exact_grad_norm(random_pieces(flat, generator)) == whole
    assert exact_grad_norm(random_pieces(flat.float(), generator)) == whole
    assert exact_grad_norm([flat.repeat_interleave(2)[::2]]) == whole


def test_a_sum_of_floats_has_not():
    flat, _ = spread_values(0, 1 << 16, 3)
    sums = {sum((p * p).sum() for p in flat.chunk(n)).sqrt().item() for n in (1, 2, 4, 8, 16, 32)}
    assert len(sums) > 1


@given(values=st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=30), exponent=st.integers(-140, 90))
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_norm_is_the_nearest_fp32_to_the_exact_one(values, exponent):
    floats = torch.tensor([math.ldexp(v, exponent) for v in values], dtype=torch.float64).float()
    assert nearest(exact_grad_norm([floats]), sum(Fraction(v) ** 2 for v in floats.tolist()))


@given(values=st.lists(finite, min_size=1, max_size=50))
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_norm_is_the_nearest_fp32_to_its_definition(values):
    values = torch.tensor(values).tolist()
    square = counted(values)
    assume(square <= Fraction(MAX) ** 2)
    assert nearest(exact_grad_norm([torch.tensor(values)]), square)


@pytest.mark.parametrize(
    "values, norm",
    (
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([3.0, -4.0], 5.0),
        ([TINY], TINY),
        ([TINY] * 9, 3 * TINY),
        ([-(2.0**-126), TINY], 2.0**-126),
        ([1e-38, 0.0], fp32_of_bits(bits_of_float(1e-38))),
        ([2.0**24, 2.0**12, 2.0**12, 1.0], 2.0**24),  # (2^24 + 1)^2: to even, which is down
        ([2.0**24, *[2.0**12] * 6, 3.0], 2.0**24 + 4),  # and up
        ([MAX], MAX),
        ([MAX, MAX], math.inf),
        ([1.0] * 1000 + [1e-30] * 1000, fp32_of_bits(bits_of_float(math.sqrt(1000)))),
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


@pytest.mark.parametrize("largest", (-140, -110, -97, -96, -95, -94))
def test_subnormals_count_even_where_the_cpu_flushes_them(largest):
    values = [2.0**largest, *[2.0**-126 - TINY] * 100]
    square, tensor = counted(values), torch.tensor(values)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        limbs = kernels.square_limbs([tensor], kernels.largest([tensor])).tolist()
    finally:
        torch.set_flush_denormal(False)
    assert sum(limb << 32 * n for n, limb in enumerate(limbs)) * Fraction(4) ** (max(map(place, values)) - 7) == square


@given(seed=seeds, down=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_small_elements_beside_a_large_one_are_cut_as_defined(seed, down):
    small = spread_values(seed, 300, 0)[0] * 2.0**-down
    values = torch.cat((torch.tensor([1.9999999]), small)).tolist()
    largest = kernels.largest([torch.tensor(values)])
    limbs = kernels.square_limbs([torch.tensor(values)], largest).tolist()
    assert sum(limb << 32 * n for n, limb in enumerate(limbs)) == counted(values) / Fraction(4) ** (
        max(map(place, values)) - 7
    )


def test_limbs_have_room():
    # The worst piece there can be: each limb keeps to 32 bits, so that 2^31 pieces can be summed.
    worst = torch.full((kernels.CHUNK,), MAX)
    limbs = kernels.square_limbs([worst], kernels.largest([worst])).tolist()
    assert all(0 <= limb < 1 << 32 for limb in limbs)
    assert sum(limb << 32 * n for n, limb in enumerate(limbs)) == kernels.CHUNK * ((2**24 - 1) << 7) ** 2


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="float64"):
        exact_grad_norm([torch.ones(2, dtype=torch.float64)])


def kernel_cases(numbers: int = 70001) -> list[list[Tensor]]:
    """Lists of fp32 gradients, most of so many numbers, that kernel and plain torch must agree on."""
    special = (0.0, -0.0, TINY, -TINY, 2.0**-126, MAX, -MAX, math.inf, -math.inf, math.nan)
    wide, narrow = spread_values(0, 3 * kernels.CHUNK + 5, 40)[0], spread_values(1, numbers, 0)[0]
    return [
        [wide],
        [narrow, wide],
        [narrow[1:], narrow[2:3], narrow[5:18], wide[3:].view(-1, 2), torch.empty(0), torch.tensor(2.5)],
        [narrow[: kernels.CHUNK - 1], narrow[: kernels.CHUNK], narrow[: kernels.CHUNK + 1]],
        [narrow * 2.0**-149],
        [torch.full((kernels.CHUNK + 1,), MAX)],
        *([torch.tensor([value]), narrow[7:100]] for value in special),
        *([torch.full((n,), 0.1)] for n in (1, 2, 31, 2047, 2048, 2049)),
    ]


def test_gradients_on_two_devices_are_not_one_list():
    with pytest.raises(ValueError, match="several devices"):
        kernels.largest([torch.ones(1), torch.ones(1, device="meta")])


@pytest.mark.parametrize("function", (get_grad_norm_fp32, fp64_grad_norm))
@pytest.mark.parametrize("norm_type", (1, 3.0, math.inf))
def test_other_norms_are_refused(function, norm_type):
    with pytest.raises(ConfigError, match=f"norm_type={norm_type}"):
        function([torch.ones(2)], norm_type)


def parameters_of(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_the_signatures_are_those_of_megatron():
    from megatron.core.optimizer import clip_grads as stock

    for function in (get_grad_norm_fp32, fp64_grad_norm):
        assert parameters_of(function) == parameters_of(stock.get_grad_norm_fp32)
    clip = stock.clip_grad_by_total_norm_fp32
    assert parameters_of(clip_by_powers_of_two(clip)) == parameters_of(clip)


NUMERICS = NumericsSettings(virtual_shards=8, clip_rounding="pow2")


def test_every_module_that_imported_megatrons_function_gets_tpis():
    from tp_invariant_recipes.numerics.megatron.replacements import replacements
    from tp_invariant_recipes.replacement import applied

    targets = [r for r in replacements(NUMERICS) if r.target.endswith(":get_grad_norm_fp32")]
    with applied(targets):
        from megatron.core.optimizer import layer_wise_optimizer, optimizer

        assert optimizer.get_grad_norm_fp32 is layer_wise_optimizer.get_grad_norm_fp32 is get_grad_norm_fp32


# --- the published schemes ---


@given(seed=seeds, count=st.integers(1, 2000), width=st.sampled_from((0, 5, 20)))
@settings(max_examples=20, deadline=None)
def test_the_fp64_norm_is_within_an_ulp_of_the_exact_one(seed, count, width):
    flat, generator = spread_values(seed, count, width)
    norm = grad_norm._fp64_grad_norm(random_pieces(flat, generator), [])
    assert abs(bits_of_float(norm) - bits_of_float(exact_grad_norm([flat]))) <= 1


def test_the_fp64_sum_depends_on_its_order():
    flat = torch.tensor([2.0**27] + [1.0] * 6)  # one unit in 2^54 is lost, six together are not
    assert sum(v * v for v in flat.double()) != sum(v * v for v in flat.double().flip(0))
    assert exact_grad_norm([flat]) == exact_grad_norm([flat.flip(0)])


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_the_fp64_norm_of_what_is_not_finite(value):
    assert str(grad_norm._fp64_grad_norm([torch.tensor([1.0, value])], [])) == str(value)
    assert grad_norm._fp64_grad_norm([torch.tensor([MAX, MAX])], []) == math.inf


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_powers_of_two_are_rounded_down_to(coefficient):
    power = rounded_down_to_power_of_two(coefficient)
    assert math.frexp(power)[0] == 0.5
    assert Fraction(power) <= Fraction(coefficient) < 2 * Fraction(power)


@pytest.mark.parametrize("value", (0.0, math.inf, math.nan))
def test_what_has_no_power_of_two_below_stays(value):
    assert str(rounded_down_to_power_of_two(value)) == str(value)


norms = st.floats(min_value=1e-30, max_value=MAX)


@given(max_norm=st.one_of(norms, st.integers(1, 100)), total_norm=norms)
@settings(max_examples=EXAMPLES, deadline=None)
def test_megatron_gets_a_coefficient_that_is_a_power_of_two(max_norm, total_norm):
    calls = []
    clip = clip_by_powers_of_two(lambda *arguments: calls.append(arguments))
    clip(["p"], max_norm=max_norm, total_norm=total_norm, use_decoupled_grad=True)
    ((parameters, limit, norm, decoupled),) = calls
    assert (parameters, decoupled) == (["p"], True)
    stock = max_norm / (total_norm + 1.0e-6)
    if stock < 1:
        assert limit / (norm + 1.0e-6) == rounded_down_to_power_of_two(stock)
    else:
        assert (limit, norm) == (max_norm, total_norm)


CLIP = 1.0
ORIGINAL = ChainedOptimizer.step


class Step:
    """Megatron's own step and clipping of one optimizer with two parameters, and what happens in them."""

    def __init__(self, monkeypatch, norm, skip_above=math.inf):
        self.happened, self.norm = [], norm
        config = SimpleNamespace(
            clip_grad=CLIP,
            grad_norm_skip_threshold=skip_above,
            use_precision_aware_optimizer=False,
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
            log_num_zeros_in_grad=False,
        )
        parameter = SimpleNamespace(grad=SimpleNamespace(type=lambda: "torch.cuda.FloatTensor", detach=self.collect))
        single = SimpleNamespace(config=config, get_parameters=lambda: [parameter, parameter])
        self.optimizer = SimpleNamespace(
            chained_optimizers=[single],
            config=config,
            prepare_grads=lambda: False,
            get_grad_norm=lambda: pending(self.read),
            _compute_grad_norms_by_group=lambda: None,
            step_with_ready_grads=self.update,
        )
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # no GPU is here
        monkeypatch.setattr(clip_grads, "multi_tensor_applier", self.scale)

    def collect(self):
        self.happened.append("collected")

    def read(self):
        self.happened.append("read")
        return self.norm

    def scale(self, function, overflow, grads, coefficient):
        self.happened.append(("scaled", coefficient))

    def update(self):
        self.happened.append("updated")
        return True


def test_the_gradients_are_collected_before_the_norm_is_read(monkeypatch):
    step = Step(monkeypatch, 4.0)
    result = reading_late(ORIGINAL)(step.optimizer)
    assert step.happened == ["collected", "collected", "read", ("scaled", CLIP / (4.0 + 1.0e-6)), "updated"]
    assert result == (True, 4.0, None)
    assert type(result[1]) is float


def test_megatron_alone_waits_first(monkeypatch):
    """The control, with the same coefficient."""
    step = Step(monkeypatch, 4.0)
    assert ORIGINAL(step.optimizer) == (True, 4.0, None)
    assert step.happened == ["read", "collected", "collected", ("scaled", CLIP / (4.0 + 1.0e-6)), "updated"]


@pytest.mark.parametrize("norm, updated", ((2.0, False), (0.5, True)))
def test_a_norm_is_compared_with_the_threshold(monkeypatch, norm, updated):
    step = Step(monkeypatch, norm, skip_above=1.0)
    assert reading_late(ORIGINAL)(step.optimizer)[0] is updated
    assert ("updated" in step.happened) is updated
    assert step.happened.count("read") == 1


def test_a_norm_that_nothing_used_is_a_number_afterwards(monkeypatch):
    step = Step(monkeypatch, 4.0)
    step.optimizer.config.clip_grad = 0.0
    assert reading_late(ORIGINAL)(step.optimizer)[1] == 4.0
    assert step.happened == ["updated", "read"]


def test_a_skipped_step_has_none(monkeypatch):
    step = Step(monkeypatch, 4.0)
    step.optimizer.prepare_grads = lambda: True
    assert reading_late(ORIGINAL)(step.optimizer) == (False, None, None)
    assert step.happened == []


def test_outside_of_a_step_the_norm_is_a_number(monkeypatch):
    """After a step that failed, too."""
    step = Step(monkeypatch, 4.0)
    step.optimizer.step_with_ready_grads = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        reading_late(ORIGINAL)(step.optimizer)
    assert type(pending(lambda: 2.5)) is float


def test_it_is_written_as_its_number():
    assert f"{PendingNorm(lambda: 2.5)}" == "2.5"
