# SPDX-License-Identifier: Apache-2.0
"""The requests that are open, between HTTP and the ranks. All methods run in the event loop of the server."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.features.rollouts.requests import Request
from tp_invariant_recipes.features.serve import messages
from tp_invariant_recipes.features.serve.messages import Event, Message, Versions, Weights
from tp_invariant_recipes.features.serve.metrics import Metrics

STARTING, READY, DRAINING, FAILED = "starting", "ready", "draining", "failed"


class Refused(Exception):
    """A request gets an error. status: of HTTP. key: what of the request is wrong; None: nothing is."""

    def __init__(self, status: int, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.status, self.key = status, key


@dataclass(frozen=True)
class Work:
    """A request to complete, with the id of its draws. first: of the prompt's tokens whose log-probabilities are asked
    for; None: none are.
    """

    request: Request
    stream: bool = False
    first: int | None = None


@dataclass
class Sample:
    """A completion that grows. reason: None: it has not ended."""

    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    reason: str | None = None
    versions: Versions = ()


@dataclass(eq=False)
class Open:
    """A request that ranks compute. version: of the weights as it came. changed: of it, or of those that came with it.

    scores: the line of `tpi score` of its prompt, and the version that computed it.
    """

    key: str
    work: Work
    home: int
    version: str
    samples: list[Sample]
    changed: asyncio.Event
    scores: tuple[bytes, str] | None = None
    problem: Refused | None = None

    @property
    def ended(self) -> bool:
        """Whether all samples have."""
        return all(sample.reason is not None for sample in self.samples)


class Backend:
    """Open requests, and the ranks that compute them.

    pipes: of the ranks. homes: data-parallel ranks. weights: that ranks have. queue: completions that may be open.
    located: the weights of a source and a step; it raises TpiError: they do not fit.
    """

    def __init__(
        self,
        pipes: Sequence[Connection],
        homes: int,
        weights: Weights,
        queue: int,
        located: Callable[[str, int | None], Weights],
    ) -> None:
        self.pipes, self.homes, self.weights, self.queue, self.located = pipes, homes, weights, queue, located
        self.state, self.reason, self.metrics = STARTING, "", Metrics()
        self.tokens = 0  # of the cache
        self.open: dict[str, Open] = {}
        self.paused: str | None = None
        self.updating = False
        self.drained = asyncio.Event()
        self._keys = map(str, itertools.count())
        self._asked: dict[str, asyncio.Future[messages.Answer]] = {}
        self._ready: dict[int, messages.Ready] = {}
        self._homes: dict[int, Connection] = {}
        self._listening: list[Connection] = []
        self._delayed: dict[Open, Message] = {}  # what waits for other weights, while `_delays`
        self._delays = False
        self._changed = asyncio.Event()
        self._out: SimpleQueue[tuple[Connection, Sequence[Message]]] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        Thread(target=self._write, daemon=True).start()
        for number, pipe in enumerate(pipes):
            self._loop.add_reader(pipe.fileno(), self._read, number)

    def _write(self) -> None:
        """Write to pipes, which may be full."""
        while True:
            pipe, several = self._out.get()
            try:
                pipe.send(several)
            except OSError:  # its rank has ended, which the launcher sees
                continue

    def _read(self, number: int) -> None:
        try:
            while self.pipes[number].poll():
                for event in self.pipes[number].recv():
                    self._take(number, event)
        except (EOFError, OSError):
            self._loop.remove_reader(self.pipes[number].fileno())

    def _take(self, number: int, event: Event) -> None:
        match event:
            case messages.Ready():
                self._ready[number] = event
                self._count_ready()
            case messages.Drawn(key, number, tokens, log_probabilities, versions) if key in self.open:
                mine, sample = self.open[key], self.open[key].samples[number]
                sample.tokens += tokens
                sample.log_probabilities += log_probabilities
                sample.versions = versions
                mine.changed.set()
            case messages.Ended(completion, versions) if completion.request in self.open:
                mine = self.open[completion.request]
                mine.samples[completion.sample] = Sample(
                    [*completion.tokens], [*completion.log_probabilities], completion.finish_reason, versions
                )
                self.metrics.completed(completion.finish_reason, len(completion.tokens))
                mine.changed.set()
                if mine.ended:
                    self._close(mine)
            case messages.Answer(key) if (future := self._asked.pop(key, None)) is not None and not future.done():
                future.set_result(event)

    def _count_ready(self) -> None:
        homes = {ready.home for ready in self._ready.values()}
        if len(homes) < self.homes:
            return
        listening = {n: ready for n, ready in self._ready.items() if ready.listens}
        self._listening = [self.pipes[n] for n in listening]
        of_home = {ready.home: self.pipes[n] for n, ready in listening.items()}
        self._homes = {home: of_home.get(home, self._listening[0]) for home in sorted(homes)}
        self.tokens = min(ready.tokens for ready in self._ready.values())
        self.state = READY

    def _close(self, mine: Open) -> None:
        if self.open.pop(mine.key, None) is not None:
            mine.changed.set()
            self._changed.set()
        if self.state == DRAINING and not self.open:
            self._end()

    def check(self) -> None:
        """Raise Refused: no new request is taken."""
        if self.state != READY:
            raise Refused(503, self.reason or f"the server is {self.state}")

    def submit(self, works: Sequence[Work]) -> list[Open]:
        """Open requests. Raises Refused: there are too many."""
        self.check()
        count = sum(work.request.sampling.num_return_sequences for work in works)
        waiting = sum(len(each.samples) for each in self.open.values())
        if count + waiting > self.queue:
            if count > self.queue:
                raise Refused(413, f"{count} completions are more than the {self.queue} that may wait (--queue)")
            raise Refused(429, f"{waiting} completions are open, and at most {self.queue} may be (--queue)")
        changed = asyncio.Event()
        opened, joins = [], []
        for work in works:
            mine = self._opened(work, changed)
            join = messages.Join(replace(work.request, id=mine.key), work.request.id, mine.home, work.stream)
            opened.append(mine)
            joins.append(join)
        if self._delays:
            self._delayed.update(zip(opened, joins, strict=True))
        else:
            self._send(*joins)
        return opened

    def _opened(self, work: Work, changed: asyncio.Event) -> Open:
        request = work.request
        loads = dict.fromkeys(self._homes, 0)
        home = None
        for each in self.open.values() if len(loads) > 1 else ():
            loads[each.home] += len(each.samples)
            if each.work.request.tokens == request.tokens:  # its prefix is computed there
                home = each.home
        home = min(loads, key=loads.__getitem__) if home is None else home
        samples = [Sample() for _ in range(request.sampling.num_return_sequences)]
        mine = Open(next(self._keys), work, home, self.weights.version, samples, changed)
        self.open[mine.key] = mine
        self.metrics.add("tpi_prompt_tokens_total", len(request.tokens))
        return mine

    def _send(self, *several: Message) -> None:
        """Send messages: requests to the rank that listens for theirs, others to all that listen."""
        for pipe in self._listening:
            mine = [one for one in several if not isinstance(one, messages.Join) or self._homes[one.home] is pipe]
            if mine:
                self._out.put((pipe, mine))

    def leave(self, opened: Sequence[Open], *, told: bool) -> None:
        """Let requests end. told: whether somebody waits for what they have become."""
        for mine in opened:
            if mine.key not in self.open:
                continue
            if mine in self._delayed:
                del self._delayed[mine]
                for sample in mine.samples:
                    sample.reason = messages.ABORT
                self._close(mine)
                continue
            self._send(messages.Leave(mine.key))
            if not told:
                self._close(mine)

    async def score(self, sequences: Sequence[ScoredSequence]) -> tuple[list[bytes], str]:
        """Return the lines of `tpi score`, and the version of the weights. Raises Refused."""
        self.check()
        answer = await self._ask(messages.Score(next(self._keys), sequences))
        if answer.problem is not None:
            raise Refused(500, answer.problem)
        return [*answer.lines], answer.version

    async def _ask(self, message: messages.Score | messages.Load) -> messages.Answer:
        future = self._asked[message.key] = self._loop.create_future()
        self._send(message)
        return await future

    async def update(self, source: str, step: int | None, *, abort: bool) -> None:
        """Load other weights. Raises Refused: they are not loaded.

        abort: end the requests that are open; else they end with the weights of before, unless they are paused, and
        new ones wait.
        """
        self.check()
        if self.updating:
            raise Refused(409, "weights are being loaded; wait for the answer of the request before")
        if self.paused == "in_place" and self.open and not abort:
            raise Refused(409, "paused in_place: keys of the cache would be of other weights; pause with mode=retract")
        self.updating, outcome = True, "refused"
        try:
            new = await asyncio.to_thread(self.located, source, step)
            if abort:
                self.leave([*self.open.values()], told=True)
            if abort or not self.paused:
                self._delays = True
                while len(self.open) > len(self._delayed):
                    self._changed.clear()
                    await self._changed.wait()
            answer = await self._ask(messages.Load(next(self._keys), new))
            if answer.problem is not None:
                raise Refused(400, f"{source}: {answer.problem}; the weights are those of before", "model_path")
            self.weights, outcome = new, "loaded"
        except TpiError as error:
            raise Refused(400, str(error), "model_path") from error
        finally:
            self.updating = self._delays = False
            self._send(*self._delayed.values())
            self._delayed.clear()
            self.metrics.add("tpi_weight_updates_total", outcome=outcome)

    def pause(self, mode: str) -> None:
        """Make no pass from now on. mode: abort, retract or in_place."""
        self.check()
        if mode == "abort":
            self.leave([*self.open.values()], told=True)
        self.paused = mode
        self._send(messages.Hold(True, forget=mode == "retract"))

    def resume(self) -> None:
        """Make passes again."""
        self.paused = None
        self._send(messages.Hold(False))

    def flush(self) -> None:
        """Forget prefixes. Raises Refused: requests are open, which have them."""
        self.check()
        if self.open:
            raise Refused(400, f"{len(self.open)} requests are open; pause with mode=abort, or wait")
        self._send(messages.Hold(self.paused is not None, forget=True))

    def drain(self) -> None:
        """Take no new requests, and end when all that are open have ended. Paused ones are aborted."""
        if self.state not in (STARTING, READY):
            return
        self.state, self.reason = DRAINING, "the server ends, and takes no new requests"
        if self.paused:
            self.leave([*self.open.values()], told=True)
        if not self.open:
            self._end()

    def _end(self) -> None:
        self._send(messages.End())
        self.drained.set()

    def fail(self, reason: str) -> None:
        """Answer all that is open with an error."""
        self.state, self.reason = FAILED, reason
        for mine in [*self.open.values()]:
            mine.problem = Refused(503, reason)
            self._close(mine)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(Refused(503, reason))
        self._changed.set()
        self.drained.set()

    def facts(self) -> dict[str, Any]:
        """Return the state, for `/get_server_info`."""
        return {
            "status": self.state, "weight_version": self.weights.version, "paused": self.paused,
            "open_completions": sum(len(each.samples) for each in self.open.values()), "cache_tokens": self.tokens,
            "max_queued_completions": self.queue,
        }  # fmt: skip
