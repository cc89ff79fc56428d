"""Draw the next token of each row: a function of log-probabilities, `Sampling`, and (seed, id, sample, position).

`portable/ieee/draw.py` has the definition. Nothing here waits for a GPU, so a CUDA graph can capture a draw.
"""

import hashlib

import torch
from torch import Tensor

from tp_invariant_recipes.features.rollouts.requests import Sampling
from tp_invariant_recipes.portable.ieee import draw as ieee

Numbers = tuple[float, float, float, float]


def numbers_of(sampling: Sampling) -> Numbers:
    """Return what draws read of it: do_sample, temperature, top_k, top_p."""
    return sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p


def request_key(seed: int, request: str) -> int:
    """Return the key of a request's random numbers, as an int64: a hash of 64 bits of its seed and id."""
    name = f"{seed} {request}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def draw(log_probabilities: Tensor, keys: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token of each row; -1 where a log-probability is NaN or +inf, or all are -inf.

    log_probabilities: [R, V] fp32, contiguous. keys: [R, 3] int64: request_key, sample, position in the completion.
    numbers: [R, 4] fp64: `Numbers`.
    returns: [R] int64, the same on every machine.
    """
    highest = log_probabilities.amax(-1)
    do_sample, temperature, top_k, top_p = numbers.unbind(1)
    draws, heat = do_sample.int(), temperature.float()
    limits = ieee.kept(log_probabilities, highest, draws, heat, top_k.int(), top_p)
    tokens = ieee.race(log_probabilities, highest, draws, heat, keys, limits)
    return torch.where(torch.isfinite(highest), tokens, -1)
