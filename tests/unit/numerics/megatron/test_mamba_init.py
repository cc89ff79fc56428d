"""How a Mamba mixer's own parameters start: Megatron's distributions, accurate, and one tensor for all degrees."""

import math

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.megatron.families import mamba

LAST = (1 << 52) - 1


@pytest.fixture(scope="module")
def drawn_bits():
    drawn = torch.randint(0, LAST, (1 << 15,), generator=torch.Generator().manual_seed(0))
    return torch.cat((torch.arange(512), LAST - torch.arange(512), drawn))[None]


def _exact(bits):
    return (2 * bits + 1).double() * 2.0**-53


def test_values_are_those_of_the_formulas(drawn_bits):
    """As Megatron's mixer computes them, in fp64 and with a library's functions."""
    u = _exact(drawn_bits)
    dt = torch.exp(u * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    expected = {
        mamba.conv: u - 0.5,
        mamba.a_log: torch.log(1.0 + 15.0 * u),
        mamba.dt_bias: dt + torch.log(-torch.expm1(-dt)),
    }
    for function, values in expected.items():
        torch.testing.assert_close(function(drawn_bits), values, rtol=2e-15, atol=2e-15)


def test_softplus_of_the_bias_is_a_step(drawn_bits):
    steps = torch.nn.functional.softplus(mamba.dt_bias(drawn_bits))
    assert 0.001 * (1 - 1e-12) <= steps.min() < 0.0011
    assert 0.09 < steps.max() <= 0.1 * (1 + 1e-12)


def test_the_exponential_is_accurate():
    x = -torch.rand(1 << 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 20.0
    torch.testing.assert_close(mamba._exp(x), torch.exp(x), rtol=2e-15, atol=0.0)


def test_the_bits_are_these_for_ever():
    drawn = {
        function.__name__: init.sample((3,), [[(0, 3)]], function, seed=1234, name="decoder.layers.0.mixer.A_log")
        for function in (mamba.conv, mamba.a_log, mamba.dt_bias)
    }
    assert {name: [value.hex() for value in values.tolist()] for name, values in drawn.items()} == BITS


BITS = {
    "conv": ["0x1.b005800000000p-2", "-0x1.1efc1c0000000p-2", "0x1.5415060000000p-2"],
    "a_log": ["0x1.5928740000000p+1", "0x1.752ca60000000p+0", "0x1.4cf86c0000000p+1"],
    "dt_bias": ["-0x1.5047180000000p+1", "-0x1.793e640000000p+2", "-0x1.86babe0000000p+1"],
}


@pytest.mark.parametrize("size", (2, 4))
def test_segments_of_unlike_sizes_are_split_each_on_its_own(size):
    """x, B and C of a convolution's channels."""
    sizes = (16, 8, 4)
    whole = init.sample((28, 1, 4), [[(0, 28)], [(0, 1)], [(0, 4)]], mamba.conv, seed=1, name="w")
    x, b, c = whole.split(sizes)
    for rank in range(size):
        shape, ranges = init.place((28 // size, 1, 4), 0, rank, size, [n // size for n in sizes])
        assert shape == [28, 1, 4]
        local = init.sample(shape, ranges, mamba.conv, seed=1, name="w")
        assert same_bits(local, torch.cat([part.chunk(size)[rank] for part in (x, b, c)]))


def test_segments_that_are_not_the_rows_are_refused():
    with pytest.raises(ValueError, match=r"7 rows are not segments of \[4, 2\]"):
        init.place((7, 2), 0, 0, 1, (4, 2))
