# SPDX-License-Identifier: Apache-2.0
"""`tpi` in forks of the worker of pytest.

Importing Megatron-Bridge takes 10 to 20 s, so each worker does it once, and every `tpi` runs in a fork of the worker:
the same code from `main()` on, in a process of its own that can be killed.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.warm import begin, trials


@dataclass
class Process:
    """A `tpi` in a fork. `wait` gives its exit status, negative for a signal, as subprocess does."""

    pid: int
    out: Path
    err: Path
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            pid, raw = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(raw)
        return self.status

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen while the process lives; pytest's own timeout is the limit."""
        while not condition():
            assert self.poll() is None, f"ended with {self.status}:\n{self.stderr}"
            time.sleep(0.02)

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()


class Tpi:
    """Starts `tpi` in a folder. Use as `tpi("train", "qwen3_toy", …)` or `tpi.start(…)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def __call__(
        self, *arguments: object, before: Callable[[], None] | None = None, status: int | None = None
    ) -> Process:
        """before: run in the new process first, to plant a fault. status: how the command must end; None: anyhow."""
        process = self.start(*arguments, before=before)
        ended = process.wait()
        assert status in (None, ended), f"status {ended}, not {status}:\n{process.stdout}{process.stderr}"
        return process

    def start(self, *arguments: object, before: Callable[[], None] | None = None) -> Process:
        """before: run in the new process first, to plant a fault."""
        self.count += 1
        out, err = (self.folder / f".{self.count}.{name}" for name in ("out", "err"))
        sys.stdout.flush()
        sys.stderr.flush()
        for known in trials:
            known.refresh()
        pid = os.fork()
        if pid == 0:
            _become(self.folder, [str(a) for a in arguments], out, err, before)
        return Process(pid, out, err)

    def ledger(self, run: str) -> list:
        """The steps of a run's ledger."""
        from tp_invariant_recipes.ledger.open import read

        return list(read(self.folder / run).steps)


def _become(folder: Path, arguments: list[str], out: Path, err: Path, before: Callable[[], None] | None) -> NoReturn:
    """Be `tpi` with these arguments in this folder, to the end of this process."""

    def planted() -> None:
        end_with_parent()  # a test that fails may leave one that waits for ever
        os.chdir(folder)
        os.environ |= {"XDG_CACHE_HOME": str(folder / ".cache"), "XDG_STATE_HOME": str(folder / ".state")}
        begin(planted=before is not None)
        if before:
            before()
        main()

    streams = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for file in (out, err)]
    become(arguments, [0, *streams], planted)


def become(arguments: Sequence[str], streams: Sequence[int], main: Callable[[], None]) -> NoReturn:
    """End this process as `main` ends. streams: what to use as standard input, output and error."""
    status = 70
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 -- for the whole process
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["tpi", *arguments]
        main()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """`tpi`."""
    from tp_invariant_recipes.cli.main import main

    main()


def freeze() -> None:
    """Make forks of this process cheap: what they inherit is left out of collections, and lies in pages of 2 MiB.

    Of a gigabyte in pages of 4 KiB, the kernel copies 250,000 entries for each fork, which takes three times as long.
    A kernel before 6.1, which has no MADV_COLLAPSE, leaves the pages as they are.
    """
    gc.collect()
    gc.freeze()
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madv_collapse, huge = 25, 2 << 20
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, *_, inode = line.split()[:5]
        if rights == "rw-p" and inode == "0":  # memory of its own
            start, end = (int(at, 16) for at in place.split("-"))
            for page in range(-(-start // huge) * huge, end - huge + 1, huge):
                madvise(page, huge, madv_collapse)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
