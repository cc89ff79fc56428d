"""Processes that a rank or a launcher starts: they end with it, and by nothing that is meant for it."""

import ctypes
import multiprocessing
import os
import signal


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
