"""Removes two costs of torch's deterministic mode that change no bit, when training starts."""

import os

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DEFAULT = ":4096:8"  # torch's own choice on Hopper and Blackwell: 32 MiB


def deterministic_mode_without_its_extras() -> None:
    """Same bits, less host time. For a process whose CUDA device and environment are set up.

    Deterministic mode fills every new tensor with NaN, one launch each; nothing here reads what it has not written.
    And torch parses CUBLAS_WORKSPACE_CONFIG with a regular expression at every product, 30 µs, long after cuBLAS has
    been given its workspace: where the value is torch's default for the device anyway, it is taken out of the
    environment once the one check for it has passed (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if os.environ.get(WORKSPACE) == DEFAULT and torch.cuda.get_device_capability()[0] >= 9:
        torch.mm(torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda"))
        del os.environ[WORKSPACE]
