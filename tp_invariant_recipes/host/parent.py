"""Processes that a rank or a launcher starts: they end with it, and by nothing that is meant for it."""

import ctypes
import os
import signal


def end_with_it(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL.

    parent: its process id, if known: where it has died before this call, this process ends at once.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and parent != os.getppid():
        os._exit(1)


def serve_it(parent: int | None = None) -> None:
    """End with the parent alone: SLURM and terminals send signals to all processes, and the parent needs this one."""
    end_with_it(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
