# SPDX-License-Identifier: Apache-2.0
"""Stands for `python -m tp_invariant_recipes` in jobs on the throw-away SLURM: hands it over to tests/slurm/server.py.

Started as `python -IS client.py SOCKET -m tp_invariant_recipes ARGUMENT …`. This process takes the place of `tpi` in
SLURM's tree of processes: it passes signals on, it ends as `tpi` ends, and when it is killed so is `tpi`.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a process that they can be passed on to
    path, *words = sys.argv[1:]
    assert words[:2] == ["-m", "tp_invariant_recipes"], words
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {"arguments": words[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps(request).encode() + b"\n")
    answers = server.makefile()
    group = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _pass_on(group, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = int(answers.readline())
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _pass_on(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # it has ended meanwhile, and its status is on its way
        return


main()
