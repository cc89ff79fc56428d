"""Initial values of a Mamba-2 mixer's own parameters: Megatron's distributions, from 52 random bits per element.

The arithmetic is fp64 + - * / only; numerics/megatron/init.py says why.
"""

import math

import torch
from torch import Tensor

from tp_invariant_recipes.kernels.normal_quantile import horner
from tp_invariant_recipes.numerics.megatron.init import _log

STEPS = (0.001, 0.1)  # range of dt, whose logarithm is uniform
DECAYS = (1.0, 16.0)  # range of -A, which is uniform
CONV = 0.5  # 1 / sqrt(4): Kaiming's bound with a = sqrt(5), for weight and bias of 4 inputs
LOG_2 = math.log(2.0)


def conv(bits: Tensor) -> Tensor:
    """Uniform in (-1/2, 1/2)."""
    return uniform(bits) * (2.0 * CONV) - CONV


def a_log(bits: Tensor) -> Tensor:
    """log of a number uniform in (1, 16)."""
    return _log(uniform(bits) * (DECAYS[1] - DECAYS[0]) + DECAYS[0])


def dt_bias(bits: Tensor) -> Tensor:
    """x with softplus(x) = dt, the logarithm of dt uniform between those of 0.001 and 0.1: dt + log(1 - exp(-dt))."""
    low, high = math.log(STEPS[0]), math.log(STEPS[1])
    dt = _exp(uniform(bits) * (high - low) + low)
    # 1 - exp(-dt) = dt (1 - dt/2! + dt²/3! …); the series avoids the cancellation of the difference
    series = horner(-dt, [1.0 / math.factorial(k) for k in range(1, 14)])
    return dt + _log(dt * series)


def uniform(bits: Tensor) -> Tensor:
    """(2 · bits + 1) / 2^53: never 0, never 1."""
    return (2 * bits + 1).to(torch.float64) * 2.0**-53


def _exp(x: Tensor) -> Tensor:
    """e^x for x in [-20, 0], to an ulp or two: x = k log 2 + r, |r| <= log(2)/2."""
    k = torch.round(x * (1.0 / LOG_2))
    r = x - k * LOG_2
    powers = torch.tensor([2.0**-n for n in range(32)], dtype=torch.float64, device=x.device)
    return horner(r, [1.0 / math.factorial(n) for n in range(16)]) * powers[(-k).to(torch.int64)]
