# SPDX-License-Identifier: Apache-2.0
"""The machine that this process runs on: its instructions, the memory that it can still get, its network address.

The instructions with which libraries compute decide the bits of sums on a CPU.
oneDNN takes the best kind that the processor has and ONEDNN_MAX_CPU_ISA allows (its page "CPU Dispatcher Control").
torch says of itself what it takes, ATEN_CPU_CAPABILITY included. MKL decides by the vendor and MKL_ENABLE_INSTRUCTIONS.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# By the version of cgroups: limit, use, and the line of memory.stat with file pages that the kernel gives up at need.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that new processes can take without swapping: of the machine, and under every limit of this process's
    control groups. None: the machine does not say.
    """
    return min([*_of_machine(proc), *_of_groups(proc, cgroups)], default=None)


def _of_machine(proc: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each limit leaves; a group without a limit has none.

    SLURM and containers set them on groups further up.
    """
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            version, root = (2, cgroups) if not controllers else (1, cgroups / "memory")
            if version == 2 or "memory" in controllers.split(","):
                inside = root / path.lstrip("/")
                for group in (inside, *inside.parents):
                    if group.is_relative_to(root):
                        yield from _free_bytes(group, *FILES[version])


def _free_bytes(group: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max": no limit; a container shows its own group as the root
        allowed = int((group / limit).read_text(encoding="ascii"))
        used = int((group / use).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        yield max(0, allowed - used + int(stat.get(reclaimable, 0)))


def address_towards(host: str) -> str:
    """Return the IPv4 address from which this machine reaches `host`. Raises OSError without a route to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # connecting a datagram socket sends nothing
        return probe.getsockname()[0]


def interface(address: str) -> str | None:
    """Return the name of the network interface that has this address; None: no interface of this machine has it."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


# oneDNN's kinds in its order -> the flag of /proc/cpuinfo that the processor needs beside those before it.
_ONEDNN = {
    "SSE41": "sse4_1",
    "AVX": "avx",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx_vnni",
    "AVX2_VNNI_2": "avx_ne_convert",
    "AVX512_CORE": "avx512bw",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_FP16": "avx512_fp16",
    "AVX512_CORE_AMX": "amx_tile",
    "AVX512_CORE_AMX_FP16": "amx_fp16",
}


def capability() -> str:
    """Such as "torch AVX2, oneDNN AVX2, MKL AuthenticAMD". Two machines with equal texts use equal instructions."""
    import torch

    facts = cpu_info()
    vendor = facts.get("vendor_id") or facts.get("CPU implementer", "unknown")
    highest = os.environ.get("MKL_ENABLE_INSTRUCTIONS")
    mkl = vendor + (f" up to {highest}" if highest else "")
    return f"torch {torch.backends.cpu.get_cpu_capability()}, oneDNN {onednn(facts, os.environ)}, MKL {mkl}"


def cpu_info() -> dict[str, str]:
    """Return what /proc/cpuinfo says of the first processor."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def onednn(facts: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Return the kind of instructions that oneDNN takes. facts: of /proc/cpuinfo, of one processor."""
    flags, kinds = {*facts.get("flags", "").split()}, list(_ONEDNN)
    cap = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").upper()
    allowed = kinds[: kinds.index(cap) + 1] if cap in kinds else kinds
    return next((kind for kind in reversed(allowed) if _ONEDNN[kind] in flags), "default")
