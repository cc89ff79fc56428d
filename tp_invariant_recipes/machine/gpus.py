# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA GPUs that this process may use. The driver lists them without starting CUDA, which forbids forking."""

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

PEERS = (2, 4, 8)  # GPUs of a host that may sum through symmetric memory


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a slice of one (MIG). name: from the driver; capability: (major, minor); memory: bytes."""

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
        devices = [_parts(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [next(iter(parts.values())) for parts in devices] if chosen is None else _chosen(devices, chosen)


def _chosen(devices: list[dict[str, Gpu]], names: str) -> list[Gpu]:
    """Read CUDA_VISIBLE_DEVICES as CUDA does: the first invalid entry, such as -1, ends the list.

    An entry is a number, a UUID, or a beginning of a UUID that only one device has.
    """
    chosen: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        found = [gpu for parts in devices for uuid, gpu in parts.items() if uuid.startswith(name)]
        if name.isdigit() and int(name) < len(devices):
            chosen.append(next(iter(devices[int(name)].values())))
        elif name.startswith(("GPU-", "MIG-")) and len(found) == 1:
            chosen += found
        else:
            break
    return chosen


def _parts(pynvml: ModuleType, handle: Any) -> dict[str, Gpu]:
    """Return what CUDA may use of a GPU, by UUID: first the whole, which in MIG mode stands for the first slice."""
    name, capability = _text(pynvml.nvmlDeviceGetName(handle)), pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    slices = []
    with suppress(pynvml.NVMLError):  # no MIG mode, or no more slices
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return {
        _text(pynvml.nvmlDeviceGetUUID(named)): Gpu(name, tuple(capability), pynvml.nvmlDeviceGetMemoryInfo(part).total)
        for named, part in [(handle, [*slices, handle][0]), *zip(slices, slices, strict=True)]
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def processes(uuid: str) -> int:
    """Return how many processes compute on a GPU; 0: the driver does not tell, as in some containers."""
    return len(_query("nvmlDeviceGetComputeRunningProcesses", uuid) or ())


def serial(uuid: str | None) -> str | None:
    """Return the serial number of a GPU; None: the driver does not tell, or the board has no number."""
    number = _query("nvmlDeviceGetSerial", str(uuid))
    return None if number is None else _text(number)


def _query(function: str, uuid: str) -> Any:
    """Call a function of pynvml with a GPU's handle. None: no driver library, no permission, or a part of a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return getattr(pynvml, function)(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
    except Exception:
        return None
