# SPDX-License-Identifier: Apache-2.0
"""A server whose rank is a thread: it draws token n of a prompt as its first token plus n, at -n/8."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import httpx

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.rollouts.requests import finish_reason
from tp_invariant_recipes.features.serve import messages
from tp_invariant_recipes.features.serve.backend import Backend
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.features.serve.http import Http, Service
from tp_invariant_recipes.features.serve.messages import Weights

VOCABULARY, TOKENS = 512, 4096
SLOW = 500  # a prompt that begins with it gets a token every 10 ms
STEP = 0.01


class FakeRank:
    """Reads messages and makes passes, one token of each sample in a pass."""

    def __init__(self, pipe: Any, codec: Any) -> None:
        self.pipe, self.codec, self.version, self.held = pipe, codec, "v0", False
        self.paced = False  # a token every 10 ms for any prompt
        self.delay = 0.05  # seconds that a score or an update takes
        self.samples: dict[tuple[str, int], Any] = {}
        self.log: list[Any] = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        self.tell(messages.Ready(0, 0, TOKENS))
        while True:
            slow = self.paced or all(m.request.tokens[0] == SLOW for m, *_ in self.samples.values())
            wait = None if not self.samples or self.held else STEP if slow else 0
            while self.pipe.poll(wait):
                for message in self.pipe.recv():
                    self.log.append(message)
                    if message == messages.END:
                        return
                    self.take(message)
                wait = 0
            if not self.held:
                self.step()

    def tell(self, event: Any) -> None:
        self.pipe.send([event])

    def take(self, message: Any) -> None:
        match message:
            case messages.Join(request):
                for n in range(request.sampling.num_return_sequences):
                    self.samples[request.id, n] = (message, [], [])
            case messages.Leave(key):
                for place in [place for place in self.samples if place[0] == key]:
                    self.end(place, messages.ABORT)
            case messages.Hold(held, _):
                self.held = held
            case messages.Task(key, scored) if scored:
                time.sleep(self.delay)
                rows = [
                    {"token_ids": s.tokens[s.first :], "logprobs": [-0.5] * len(s.tokens[s.first :])} for s in scored
                ]
                self.tell(messages.Answer(key, self.version, [json.dumps(row).encode() for row in rows]))
            case messages.Task(key, _, weights):
                time.sleep(self.delay)
                problem = "its values are not finite" if weights.version == "nan" else None
                if problem is None:
                    for _, drawn, runs in self.samples.values():
                        runs.append((self.version, len(drawn) - sum(count for _, count in runs)))
                    self.version = weights.version
                self.tell(messages.Answer(key, self.version, problem=problem))

    def step(self) -> None:
        for place, (message, drawn, _) in [*self.samples.items()]:
            drawn.append((message.request.tokens[0] + len(drawn) + place[1]) % VOCABULARY)
            reason = finish_reason(drawn, message.request.sampling, self.codec and self.codec.decode)
            if reason:
                self.end(place, reason)
            elif message.stream:
                self.tell(messages.Drawn(*place, [drawn[-1]], [-len(drawn) / 8], ((self.version, len(drawn)),)))

    def end(self, place: tuple[str, int], reason: str) -> None:
        message, drawn, runs = self.samples.pop(place)
        runs = [*runs, (self.version, len(drawn) - sum(count for _, count in runs))]
        told = len(drawn) - 1 if message.stream and reason != messages.ABORT else 0
        told = len(drawn) if message.stream and reason == messages.ABORT else told
        values = [-(n + 1) / 8 for n in range(told, len(drawn))]
        self.tell(
            messages.Drawn(*place, drawn[told:], values, tuple(run for run in runs if run[1]) or (runs[-1],), reason)
        )


def located(source: str, step: int | None) -> Weights:
    """Folders are named by their version."""
    if len(source) > 255:
        raise OSError(36, "File name too long")
    if source == "wide":
        raise ConfigError("wide has model.hidden_size=128, and the server 64")
    time.sleep(0.05)
    return Weights(None, None, source)


@contextmanager
def served(
    codec: Any = None, key: str | None = None, ends: tuple[int, ...] = (), queue: int = 8192, body: int = 1 << 26
) -> Iterator[tuple[httpx.Client, FakeRank, Http]]:
    """A server and a client of it. codec: bytes by default."""
    codec = codec or sequences.tokenizer("byte")
    mine, theirs = Pipe()
    listening = socket.create_server(("127.0.0.1", 0))
    prompts = Prompts(codec, VOCABULARY, ends, TOKENS, ("fake", "default"))
    backend = Backend([mine], 1, Weights(None, None, "v0"), queue, located)
    http = Http(listening, Service(backend, prompts, body, key, {"model_path": "fake"}, {}))
    rank = FakeRank(theirs, codec)
    http.start()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=http.url, timeout=30, headers=headers, trust_env=False) as client:
        while http.backend.state != "ready":
            time.sleep(0.005)
        try:
            yield client, rank, http
        finally:
            http.end("the test is over")
