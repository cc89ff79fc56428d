"""Draw the next token of each row: a function of log-probabilities, `Sampling`, and (seed, id, sample, position).

`portable/ieee/draw.py` has the definition. Nothing here waits for a GPU, so a CUDA graph can capture a draw.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_invariant_recipes.features.rollouts.requests import Sampling
from tp_invariant_recipes.portable.ieee import draw as ieee


class Parameters(NamedTuple):
    """What `Sampling` has for draws, a row each. do_sample, top_k: int32; temperature: fp32; top_p: fp64; all [R]."""

    do_sample: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def from_samplings(cls, samplings: Sequence[Sampling], device: torch.device | str) -> "Parameters":
        """Put those of each row on a device."""
        columns = {"do_sample": torch.int32, "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64}
        return cls(
            *(
                torch.tensor([getattr(sampling, name) for sampling in samplings], dtype=dtype, device=device)
                for name, dtype in columns.items()
            )
        )


def request_key(seed: int, request: str) -> int:
    """Return the key of a request's random numbers, as an int64: a hash of 64 bits of its seed and id."""
    name = f"{seed} {request}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def draw(log_probabilities: Tensor, keys: Tensor, parameters: Parameters) -> Tensor:
    """Draw a token of each row; -1 where a log-probability is NaN or +inf, or all are -inf.

    log_probabilities: [R, V] fp32, contiguous. keys: [R, 3] int64: request_key, sample, position in the completion.
    returns: [R] int64, the same on every machine.
    """
    highest = log_probabilities.amax(-1)
    do_sample, temperature, top_k, top_p = parameters
    limits = ieee.kept(log_probabilities, highest, do_sample, temperature, top_k, top_p)
    tokens = ieee.race(log_probabilities, highest, do_sample, temperature, keys, limits)
    return torch.where(torch.isfinite(highest), tokens, -1)
