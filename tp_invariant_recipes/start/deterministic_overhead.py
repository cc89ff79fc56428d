"""Removes two costs of torch's deterministic mode that change no bit, when training starts."""

import os

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DEFAULT = ":4096:8"  # torch's own choice on Hopper and Blackwell: 32 MiB


def deterministic_mode_without_its_extras() -> None:
    """Reduce host time without changing bits. Call it after setting up the CUDA device and the environment.

    Deterministic mode fills every new tensor with NaN by one launch; no code here reads unwritten memory. Also, torch
    parses CUBLAS_WORKSPACE_CONFIG with a regular expression at every product, in 30 µs, although cuBLAS already has its
    workspace. If the value is torch's default for the device, this function removes it from the environment after the
    only check for it has passed (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if os.environ.get(WORKSPACE) == DEFAULT and torch.cuda.get_device_capability()[0] >= 9:
        torch.mm(torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda"))
        del os.environ[WORKSPACE]
