"""The NVIDIA GPUs that this process may use. The driver lists them without starting CUDA, which forbids forking."""

import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """name: from the driver; capability: (major, minor); memory: bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


def visible() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; empty without a driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch asks for nvidia-ml-py, and this is it
            import pynvml
        pynvml.nvmlInit()
    except Exception:  # no module, no driver library, no permission: all mean that no GPU can be used
        return []
    try:
        gpus = [_describe(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if chosen is None else _chosen(gpus, chosen)


def _chosen(gpus: list[Gpu], names: str) -> list[Gpu]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: the first invalid entry, such as -1, ends the list."""
    chosen: list[Gpu] = []
    for name in names.split(","):
        if name.strip().isdigit() and int(name) < len(gpus):
            chosen.append(gpus[int(name)])
        elif name.strip().startswith(("GPU-", "MIG-")) and len(chosen) < len(gpus):
            chosen.append(gpus[len(chosen)])  # only the number of GPUs matters, not their identity
        else:
            break
    return chosen


def _describe(pynvml: ModuleType, handle: Any) -> Gpu:
    name = pynvml.nvmlDeviceGetName(handle)
    return Gpu(
        name=name.decode() if isinstance(name, bytes) else name,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


def processes(uuid: str) -> int:
    """Return how many processes compute on a GPU; 0: the driver does not tell, as in some containers."""
    return len(_query("nvmlDeviceGetComputeRunningProcesses", uuid) or ())


def serial(uuid: str | None) -> str | None:
    """Return the serial number of a GPU; None: the driver does not tell, or the board has no number."""
    number = _query("nvmlDeviceGetSerial", str(uuid))
    return number.decode() if isinstance(number, bytes) else number


def _query(function: str, uuid: str) -> Any:
    """Call a function of pynvml with a GPU's handle. None: no driver library, no permission, or a part of a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return getattr(pynvml, function)(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
    except Exception:
        return None
