"""The number format that an engine computed a layer in, where its error is what this format does to the reference.

    e = engine - reference        f = format(reference) - reference        the shape is one if e · f >= 0.7 |e| |f|

FP8 is E4M3: by tensor with one scale, by block with a scale for each 128 features of a token.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BLOCK = 128  # features
ALIKE = 0.7
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _by_tensor(x: Tensor) -> Tensor:
    scale = x.abs().amax().clamp(min=1e-30) / _LARGEST
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _by_block(x: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / _LARGEST
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).view(len(x), -1)[:, : x.shape[1]]


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "FP8 by tensor": _by_tensor,
    "FP8 by block": _by_block,
    "bf16": _bf16,
}


def format_of(engine: np.ndarray, reference: np.ndarray) -> str | None:
    """Return the format whose error the engine's is most like, [tokens, features] of a layer; None: it is like none."""
    exact = torch.from_numpy(np.ascontiguousarray(reference, np.float32))
    error = torch.from_numpy(np.ascontiguousarray(engine, np.float32)) - exact
    likeness = {name: _cosine(error, rounded(exact) - exact) for name, rounded in FORMATS.items()}
    nearest = max(likeness, key=lambda name: likeness[name])
    return nearest if likeness[nearest] >= ALIKE else None


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.double().norm() * b.double().norm())
    return float((a.double() * b.double()).sum()) / size if size else 0.0
