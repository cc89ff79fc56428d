"""Which NVIDIA GPUs this process may use, asked of the driver without starting CUDA (which would forbid forking)."""

import os
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """name: as the driver says; capability: (major, minor); memory: bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


def visible() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; empty where there is no driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's wish for nvidia-ml-py, which this is
            import pynvml
        pynvml.nvmlInit()
    except Exception:  # no module, no driver library, no permission: all mean that no GPU can be used
        return []
    try:
        found = [_describe(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    # As CUDA reads it: what follows the first entry that is no device, such as -1, is not looked at.
    names = takewhile(lambda c: c.startswith(("GPU-", "MIG-")) or (c.isdigit() and int(c) < len(found)), _words(chosen))
    return [found[int(c) if c.isdigit() else min(n, len(found) - 1)] for n, c in enumerate(names)]


def _describe(pynvml, handle) -> Gpu:
    name = pynvml.nvmlDeviceGetName(handle)
    return Gpu(
        name=name.decode() if isinstance(name, bytes) else name,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )
