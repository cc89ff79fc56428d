"""Operands on the GPU, of torch's own generator, which `conftest.py` starts anew before each test."""

import torch


def normal_on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, rounded to `dtype`."""
    return torch.randn(shape, device="cuda").to(dtype)
