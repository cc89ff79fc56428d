"""The instructions with which this machine's libraries compute: bits of sums on a CPU follow from them.

oneDNN takes the best kind that the processor has and ONEDNN_MAX_CPU_ISA allows (its page "CPU Dispatcher Control").
torch says of itself what it takes, ATEN_CPU_CAPABILITY included. MKL decides by the vendor and MKL_ENABLE_INSTRUCTIONS.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path


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
