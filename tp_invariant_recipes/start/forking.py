# SPDX-License-Identifier: Apache-2.0
"""Processes that a rank or launcher starts, which end with it; whether one that will use CUDA may be forked.

A process that is not forked imports Megatron-Bridge again. A fork of a process that has started CUDA cannot use it.
torch notices only what torch started, and asking the driver for the number of GPUs starts it unnoticed. So the last of
the checks forks a process and lets it use a GPU. That takes seconds, so a success is kept for the next start with the
same driver, modules and variables.
"""

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from tp_invariant_recipes.start import cache

DRIVER = Path("/proc/driver/nvidia/version")
PROOF = "fork-uses-gpu"  # name of the state in the user's cache
OF_LIBRARIES = ("CUDA", "NV", "NCCL", "TORCH", "TRITON", "PYTHON", "TPI_", "LD_")  # in names of variables
LIMIT = 60.0  # seconds that the forked process gets to use a GPU
# Set after the import: the first two by the launcher, and a rank reads them by itself (training/rank.py), as Gloo does;
# the next two by scikit-learn, which transformers may import late, the last by torch's compiler as it is imported. A
# forked rank has what they are for.
SET_LATER = (
    "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


def can_fork(imported_with: Mapping[str, str] | None, *, probe: Callable[[], bool] | None = None) -> bool:
    """Whether GPU ranks may be forked from this process.

    imported_with: the environment variables at the import of Megatron-Bridge; None: it is not imported, so that a fork
                   would save nothing. Libraries read variables when they are imported: a rank that needs others now
                   must import them anew.
    probe:         whether a forked process can use a GPU. Default: one tries.
    """
    import torch

    if imported_with is None or _relevant(imported_with) != _relevant(os.environ):
        return False
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return False
    return _kept_or_tried(probe or _fork_uses_gpu)


def _kept_or_tried(probe: Callable[[], bool]) -> bool:
    """Return what a process in this state has shown on this machine, or the probe shows now."""
    try:
        # What decides whether importing these modules has started CUDA.
        digest = hashlib.sha256(DRIVER.read_bytes() + Path("/proc/sys/kernel/random/boot_id").read_bytes())
        variables = sorted(item for item in os.environ.items() if any(word in item[0] for word in OF_LIBRARIES))
        modules = [vars(module).get("__file__") for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
        sources = (file for file in modules if file and "-packages/" not in file)  # such as a recipe
        times = cache.stamp(map(Path, {*sources, *sys.path}))  # an installation changes the time of a folder
        digest.update(repr((variables, sorted(sys.modules), times)).encode(errors="surrogateescape"))
        state = digest.hexdigest()
    except OSError:
        return probe()
    with suppress(OSError, ValueError):
        if cache.find(PROOF) == state:
            return True
    can = probe()
    if can:
        cache.keep(PROOF, state)
    return can


def _relevant(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in SET_LATER}


def _fork_uses_gpu() -> bool:
    """Whether a process forked now can make a tensor on a GPU, within LIMIT."""
    import torch

    starter = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            end_with_it(starter)  # the driver may keep it for long
            status = int(torch.ones(1, device="cuda").item() != 1)
        finally:
            os._exit(status)
    return exits_cleanly(pid, LIMIT)


def exits_cleanly(pid: int, limit: float) -> bool:
    """Wait for a child; whether it ended with status 0 within `limit` seconds. It is killed after them."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(raw) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def end_with_it(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL.

    parent: its process id, as the parent itself handed it over. Where it has died before this call, this process ends
    at once; getppid() would then name the process that adopted this process.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent != os.getppid():
        os._exit(1)


def end_with_starter() -> None:
    """End a process of multiprocessing with the process that started it, whose id travels with it."""
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid is not None:  # none: this process is no child
        end_with_it(starter.pid)


def serve_starter() -> None:
    """End with the parent alone: SLURM and terminals send signals to all processes, and the parent needs this one."""
    end_with_starter()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
