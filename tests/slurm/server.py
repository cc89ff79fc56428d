# SPDX-License-Identifier: Apache-2.0
"""One import of Megatron-Bridge for all jobs on the throw-away SLURM.

Each node of a job starts an interpreter that would import Bridge for 10 to 20 s. In the tests that interpreter is
tests/slurm/client.py. It asks a fork of the worker of pytest, which has imported Bridge, for another fork that

- enters the network, the host name and the mounts of the node,
- takes over the client's arguments, folder, environment and standard streams,
- and runs `tpi` from `main()` on.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import forks

CLIENT = Path(__file__).with_name("client.py")
NAMESPACES = ("net", "uts", "mnt")


@contextmanager
def serving(folder: Path, main: Callable[[], None] | None = None) -> Iterator[Path]:
    """An executable in `folder` that stands for the interpreter on nodes. main: default: that of `tpi`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(100)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {CLIENT} {folder}/socket "$@"\n')
    python.chmod(0o755)
    server = os.fork()
    if server == 0:
        try:
            forks.end_with_parent()
            _serve(listener, main or forks.main)
        finally:
            os._exit(70)
    listener.close()
    try:
        yield python
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve(listener: socket.socket, main: Callable[[], None]) -> None:
    """For ever: one process for every client."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those processes ended
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(connection, main)
            os._exit(0)
        connection.close()


def _attend(connection: socket.socket, main: Callable[[], None]) -> None:
    """Start what the client asks for, tell it the process, then how that ended; end it when the client is killed."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    namespaces = [os.open(f"/proc/{client}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    process = os.fork()
    if process == 0:
        connection.close()
        os.setpgid(0, 0)

        def entered() -> None:
            for namespace in namespaces:
                os.setns(namespace)
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            main()

        forks.become(request["arguments"], streams, entered)
    os.setpgid(process, process)  # here too: the client may pass a signal on at once
    for descriptor in (*streams, *namespaces):
        os.close(descriptor)
    connection.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(f"{status}\n".encode())
