# SPDX-License-Identifier: Apache-2.0
"""The requests that are open, between HTTP and the ranks. All methods run in the event loop of the server."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.errors import TpiError, reason
from tp_invariant_recipes.features.rollouts.requests import Request
from tp_invariant_recipes.features.serve import messages
from tp_invariant_recipes.features.serve.messages import Event, Message, Versions, Weights

STARTING, READY, DRAINING, FAILED = "starting", "ready", "draining", "failed"


def decimals(log_probabilities: Sequence[float]) -> list[float]:
    """Return numbers whose JSON is the shortest that gives back the fp32."""
    return [float(text) for text in np.array(log_probabilities, np.float32).astype(str)]


class Refused(Exception):
    """A request gets an error. status: of HTTP. key: what of the request is wrong; None: nothing is."""

    def __init__(self, status: int, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.status, self.key = status, key


@dataclass
class Sample:
    """A completion that grows. reason: None: it has not ended. versions: of its tokens, once it has some."""

    number: int
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    reason: str | None = None
    versions: Versions = ()


@dataclass(eq=False)
class Open:
    """A request that ranks compute. changed: it has, or one that came with it.

    scores: the line of `tpi score` of its prompt, and the version that computed it.
    """

    key: str
    request: Request
    home: int
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
        self, pipes: Sequence[Connection], homes: int, weights: Weights, queue: int,
        located: Callable[[str, int | None], Weights],
    ) -> None:  # fmt: skip
        self.pipes, self.homes, self.weights, self.queue, self.located = pipes, homes, weights, queue, located
        self.state, self.reason, self.tokens = STARTING, "", 0  # tokens of the cache
        self.open: dict[str, Open] = {}
        self.paused = self.updating = False
        self.drained = asyncio.Event()
        self.delayed: dict[str, Message] | None = None  # requests that wait for other weights; None: none have to
        self._keys = map(str, itertools.count())
        self._asked: dict[str, asyncio.Future[messages.Answer]] = {}
        self._homes: dict[int, Connection] = {}  # the pipe of the rank that listens for each
        self._changed = asyncio.Event()
        self._out: SimpleQueue[tuple[Connection, Sequence[Message]]] = SimpleQueue()
        self._metrics: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # by name and labels

    def start(self) -> None:
        """Listen to the ranks, in the event loop that calls it."""
        Thread(target=self._write, daemon=True).start()
        for pipe in self.pipes:
            asyncio.get_running_loop().add_reader(pipe.fileno(), self._read, pipe)

    def _write(self) -> None:
        """Write to pipes, which may be full."""
        while True:
            pipe, several = self._out.get()
            try:
                pipe.send(several)
            except OSError:  # its rank has ended, which the launcher sees
                continue

    def _read(self, pipe: Connection) -> None:
        try:
            for event in pipe.recv():
                self._take(event)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    def _take(self, event: Event) -> None:
        match event:
            case messages.Ready(home, first, tokens):
                self._homes[home] = self.pipes[first]
                self.tokens = min(tokens, self.tokens or tokens)
                if len(self._homes) == self.homes and self.state == STARTING:
                    self.state = READY
            case messages.Drawn(key, number) if key in self.open:
                mine, sample = self.open[key], self.open[key].samples[number]
                sample.tokens += event.tokens
                sample.log_probabilities += decimals(event.log_probabilities)
                sample.versions, sample.reason = event.versions, event.reason
                mine.changed.set()
                if event.reason is not None:
                    self.count("tpi_completions_total", finish_reason=event.reason)
                    self.count("tpi_generation_tokens_total", len(sample.tokens))
                if mine.ended:
                    self._close(mine)
            case messages.Answer(key) if (future := self._asked.get(key)) is not None and not future.done():
                future.set_result(event)

    def count(self, metric: str, value: float = 1, **labels: str) -> None:
        """Add to a counter of `/metrics`."""
        self._metrics[metric][",".join(f'{label}="{of}"' for label, of in labels.items())] += value

    def metrics(self) -> str:
        """Return all in Prometheus' text format, with the gauges of now."""
        gauges = {"tpi_open_completions": {"": self._waiting()}}
        gauges["tpi_weights_info"] = {f'weight_version="{self.weights.version}"': 1}
        lines = []
        for name, values in (self._metrics | gauges).items():
            lines.append(f"# TYPE {name} {'gauge' if name in gauges else 'counter'}")
            lines += [f"{name}{labels and f'{{{labels}}}'} {value:.15g}" for labels, value in sorted(values.items())]
        return "\n".join(lines) + "\n"

    def _waiting(self) -> int:
        return sum(len(each.samples) for each in self.open.values())

    def check(self) -> None:
        """Raise Refused: no new request is taken."""
        if self.state != READY:
            raise Refused(503, self.reason or f"the server is {self.state}")

    def submit(self, requests: Sequence[Request], *, stream: bool) -> list[Open]:
        """Open requests, whose ids name their draws. Raises Refused: there are too many."""
        self.check()
        count, waiting = sum(each.sampling.num_return_sequences for each in requests), self._waiting()
        if count > self.queue:
            raise Refused(413, f"{count} completions are more than the {self.queue} that may wait (--queue)")
        if count + waiting > self.queue:
            raise Refused(429, f"{waiting} completions are open, and at most {self.queue} may be (--queue)")
        changed, opened, joins = asyncio.Event(), [], {}
        for request in requests:
            key, samples = next(self._keys), [*map(Sample, range(request.sampling.num_return_sequences))]
            self.open[key] = mine = Open(key, request, self._home(request), samples, changed)
            opened.append(mine)
            joins[key] = messages.Join(replace(request, id=key), request.id, mine.home, stream)
            self.count("tpi_prompt_tokens_total", len(request.tokens))
        if self.delayed is None:
            self._send(*joins.values())
        else:
            self.delayed |= joins
        return opened

    def _home(self, request: Request) -> int:
        """Return the data-parallel rank that has the prefix of a request, else one that has the fewest completions."""
        loads = dict.fromkeys(self._homes, 0)
        for each in self.open.values() if len(loads) > 1 else ():
            if each.request.tokens == request.tokens:
                return each.home
            loads[each.home] += len(each.samples)
        return min(loads, key=loads.__getitem__)

    def _send(self, *several: Message) -> None:
        """Send messages: requests to the rank that listens for theirs, others to all that listen."""
        for pipe in dict.fromkeys(self._homes.values()):
            mine = [one for one in several if not isinstance(one, messages.Join) or self._homes[one.home] is pipe]
            if mine:
                self._out.put((pipe, mine))

    def _close(self, mine: Open) -> None:
        if self.open.pop(mine.key, None) is not None:
            mine.changed.set()
        self._settle()

    def _settle(self) -> None:
        """Note that something has ended: of a server that ends, it may have been the last."""
        self._changed.set()
        if self.state == DRAINING and not (self.open or self._asked or self.updating):
            self._send(messages.END)
            self.drained.set()

    def leave(self, opened: Sequence[Open], *, told: bool) -> None:
        """Let requests end. told: whether somebody waits for what they have become."""
        for mine in opened:
            if mine.key not in self.open:
                continue
            if self.delayed is not None and self.delayed.pop(mine.key, None) is not None:
                for sample in mine.samples:
                    sample.reason, sample.versions = messages.ABORT, ((self.weights.version, 0),)
                self._close(mine)
                continue
            self._send(messages.Leave(mine.key))
            if not told:
                self._close(mine)

    def abort(self, name: str | None, *, all: bool) -> None:
        """End the requests of an id, those of its list included, or all. Raises Refused: neither is named, or both."""
        if (name is None) == (not all):
            raise Refused(400, "rid, abort_all: either an id, or true", "rid")
        ids = ((each, each.request.id) for each in self.open.values())
        self.leave([each for each, id in ids if all or name in (id, id.rpartition("_")[0])], told=True)

    async def score(self, sequences: Sequence[ScoredSequence]) -> messages.Answer:
        """Return the lines of `tpi score`, and the version of the weights. Raises Refused."""
        self.check()
        if not sequences:
            return messages.Answer("", self.weights.version)
        answer = await self._ask(messages.Task(next(self._keys), sequences))
        if answer.problem is not None:
            raise Refused(500, answer.problem)
        self.count("tpi_scored_tokens_total", sum(len(each.tokens) - each.first for each in sequences))
        return answer

    async def _ask(self, task: messages.Task) -> messages.Answer:
        if self.state == FAILED:
            raise Refused(503, self.reason)
        future = self._asked[task.key] = asyncio.get_running_loop().create_future()
        self._send(task)
        try:
            return await future
        finally:
            del self._asked[task.key]
            self._settle()

    async def update(self, source: str, step: int | None, *, abort: bool) -> None:
        """Load other weights. Raises Refused: they are not loaded.

        abort: end the requests that are open; else they end with the weights of before, unless they are paused, and
        new ones wait.
        """
        if self.updating:
            raise Refused(409, "weights are being loaded; wait for the answer of the request before")
        self.updating, outcome = True, "refused"
        try:
            new = await asyncio.to_thread(self.located, source, step)
            if abort:
                self.leave([*self.open.values()], told=True)
            if abort or not self.paused:
                self.delayed = {}
            while self.delayed is not None and len(self.open) > len(self.delayed):
                self._changed.clear()
                await self._changed.wait()
            answer = await self._ask(messages.Task(next(self._keys), weights=new))
            if answer.problem is not None:
                raise Refused(400, f"{source}: {answer.problem}; the weights are those of before", "model_path")
            self.weights, outcome = new, "loaded"
        except (TpiError, OSError, ValueError) as error:
            raise Refused(400, reason(error), "model_path") from error
        finally:
            self._send(*(self.delayed or {}).values())
            self.updating, self.delayed = False, None
            self.count("tpi_weight_updates_total", outcome=outcome)
            self._settle()

    def pause(self, *, abort: bool) -> None:
        """Make no pass from now on. abort: end the requests that are open."""
        if abort:
            self.leave([*self.open.values()], told=True)
        self.paused = True
        self._send(messages.Hold(True))

    def resume(self) -> None:
        """Make passes again."""
        self.paused = False
        self._send(messages.Hold(False))

    def flush(self) -> None:
        """Forget prefixes. Raises Refused: requests are open, which have them."""
        if self.open:
            raise Refused(400, f"{len(self.open)} requests are open; pause with mode=abort, or wait")
        self._send(messages.Hold(self.paused, forget=True))

    def drain(self) -> None:
        """Take no new requests, and end when all that are open have ended. Paused ones are aborted."""
        if self.state == READY:
            self.state, self.reason = DRAINING, "the server ends, and takes no new requests"
            if self.paused:
                self.leave([*self.open.values()], told=True)
            self._settle()

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
            "open_completions": self._waiting(), "cache_tokens": self.tokens, "max_queued_completions": self.queue,
        }  # fmt: skip
