# SPDX-License-Identifier: Apache-2.0
"""The audits of a campaign, several at a time, each in a process that starts ranks of its own."""

import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, TpiError
from tp_invariant_recipes.features.audit import resume, workflow
from tp_invariant_recipes.features.audit.result import FAILED, AuditRun
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.ranks import Stop
from tp_invariant_recipes.runs.sweep_dir import AuditedRun
from tp_invariant_recipes.start import forking

POLL = 0.2  # seconds between looks at the signals that came
MOST = 4  # at a time: what comes first is told first


class ConcurrentRuns:
    """The calls that run, each in a fork of this process.

    stop: the signals that came. Each is passed on to the calls.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop, self._passed_on = stop, 0
        self._running: dict[Connection, tuple[Any, Any]] = {}  # -> the key of the call, and its process

    def __len__(self) -> int:
        return len(self._running)

    @property
    def keys(self) -> list[Any]:
        """Of the calls that run."""
        return [key for key, _ in self._running.values()]

    def start(self, key: Any, call: Callable[[], Any]) -> None:
        """Run a call. What it returns must be picklable."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(there, call))
        process.start()
        there.close()
        self._running[here] = key, process

    def next(self) -> tuple[Any, Any]:
        """Wait for the end of a call; return its key and what it returned.

        Interrupted: a signal came; all calls have ended. RunError: a call failed, or was killed.
        """
        while True:
            for connection in wait([*self._running], POLL):
                assert isinstance(connection, Connection)
                key, process = self._running.pop(connection)
                try:
                    value, error = connection.recv()
                except EOFError:
                    value, error = None, "an audit was killed"
                connection.close()
                process.join()
                if error is not None and not self._stop.signals:
                    self.end()
                    raise RunError(error)
                if error is None:
                    return key, value
            if self._stop.signals > self._passed_on:
                self._passed_on = self._stop.signals
                self._signal(signal.SIGTERM if self._passed_on == 1 else signal.SIGKILL)
            if self._stop.signals and not self._running:
                raise Interrupted

    def end(self) -> None:
        """End all calls."""
        self._signal(signal.SIGKILL)
        for _, process in self._running.values():
            process.join()
        self._running.clear()

    def _signal(self, number: int) -> None:
        for _, process in self._running.values():
            if process.is_alive():
                os.kill(process.pid, number)


def concurrency(device: str) -> int:
    """How many audits may run at a time. GPUs belong to one."""
    return min(MOST, len(os.sched_getaffinity(0))) if device == "cpu" else 1


def _answer(there: Connection, call: Callable[[], Any]) -> None:
    """Call, and send what it returns and the text of a defect."""
    forking.end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter passes a stop on
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    answer: tuple[Any, str | None]
    try:
        answer = call(), None
    except Interrupted:
        os._exit(1)
    except BaseException:
        answer = None, traceback.format_exc()
    there.send(answer)


# What an audit's process returns: None if no run may have the settings; and the reference that it trained, by its key.
Answer = tuple[AuditRun | None, dict[str, AuditedRun]]


@contextmanager
def quiet(name: str, planned: workflow.Plan) -> Iterator[Any]:
    """Show nothing, as a `Watch`: a line a configuration is enough."""
    yield lambda: None


def audited(
    model: str,
    words: Sequence[str],
    settings: tuple[str, ...],
    where: Path,
    references: Mapping[str, AuditedRun],
    watch: Watch = quiet,
    at: int | None = None,
) -> Answer:
    """Audit the overrides `words`, whose configuration has `settings`. Interrupted: a signal ended it.

    references: trained by earlier audits; an equal one is taken again. at: audit a resume at this step instead.
    """
    begun = time.monotonic()
    trained: dict[str, AuditedRun] = {}
    facts = dict[str, Any](first=None)
    try:
        with redirect_stdout(StringIO()):
            judge: Any = workflow if at is None else resume
            planned = judge.new(model, words, **({} if at is None else {"at": at}), directory=where)
            judge.check(planned)
    except ConfigError:
        return None, trained
    try:
        every = {**references}
        if at is None:
            result = workflow.execute(planned, watch, keep=True, references=every)
            trained = {key: run for key, run in every.items() if key not in references}
            verdict, text = result.verdict, result.words.partition(": ")[2]
            facts["known"] = result.known
            if first := result.first:
                facts |= {
                    "first": f"{first.kind} {first.module}",
                    "size": first.size,
                    "reference": first.rms,
                    "ranks": f"{', '.join(map(str, first.ranks))} of {first.all_ranks}",
                }
        else:
            judged = resume.execute(planned, watch, keep=True)
            verdict, text = judged.verdict, judged.words.partition(": ")[2]
            facts["known"] = judged.known
            facts["first"] = next((f"{state.kind} {state.name}" for state in judged.lost), None)
    except (Interrupted, workflow.StoppedAudit):
        raise Interrupted from None
    except TpiError as error:
        verdict, text = FAILED, str(error).replace("so that nothing can be compared\n", "")
    for name in (workflow.AUDITED, *resume.TRAININGS):
        shutil.rmtree(where / name, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 1)
    return AuditRun(settings, verdict, text, seconds=seconds, **facts), trained
