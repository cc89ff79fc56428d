# SPDX-License-Identifier: Apache-2.0
"""Operands on the GPU, of torch's own generator, which `conftest.py` starts anew before each test; and other work."""

from collections.abc import Iterator

import torch


def normal_on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(shape, device="cuda").to(dtype)


def beside_another_stream() -> Iterator[None]:
    """Twenty times, while other kernels hold some of the processors, so that programs start late."""
    beside = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(beside):
            torch.sort(torch.randn(1 << 20, device="cuda"))
        yield
