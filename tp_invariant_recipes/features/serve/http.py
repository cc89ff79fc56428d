# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of `tpi serve`, in a thread of its own beside the launcher of the ranks."""

import asyncio
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from socket import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from tp_invariant_recipes.features.serve import routes
from tp_invariant_recipes.features.serve.backend import STARTING, Backend
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.features.serve.messages import Weights

if TYPE_CHECKING:
    from tp_invariant_recipes.features.serve.workflow import ServeRequest

CONNECTIONS = 4096  # at most; uvicorn answers 503 to more
KEEP_ALIVE = 75  # seconds that a connection may be idle between requests
LAST_SECONDS = 3  # that clients have to read their answers at the end


class Http:
    """Answers requests until `end`.

    listening: the socket. pipes: of ranks. homes: data-parallel ranks. weights, located: as of `Backend`. prompts: with
    the length that the model has; the cache may shorten it. key: None: there is none. facts: of `Service`.
    """

    def __init__(
        self,
        listening: socket,
        pipes: Sequence[Connection],
        homes: int,
        weights: Weights,
        located: Callable[[str, int | None], Weights],
        prompts: Prompts,
        request: "ServeRequest",
        key: str | None,
        facts: Mapping[str, Any],
    ) -> None:
        self.listening, self.prompts, self.request, self.key, self.facts = listening, prompts, request, key, facts
        self._backend = lambda: Backend(pipes, homes, weights, request.queue, located)
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.backend: Backend | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start to answer. It is called again and again."""
        if not self._thread.ident:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY:
                most = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * CONNECTIONS)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            self._thread.start()
            self._started.wait()
        elif not self._thread.is_alive() and not (self.backend and self.backend.drained.is_set()):
            raise RuntimeError("the HTTP thread has ended")

    @property
    def state(self) -> str:
        """Whether requests are taken: as of `Backend`."""
        return self.backend.state if self.backend is not None else STARTING

    def drain(self) -> None:
        """Take no new requests, and end the ranks when the last open one has ended."""
        self._call(lambda backend: backend.drain())

    def end(self, reason: str) -> None:
        """Answer what is open with an error, and end."""
        self._call(lambda backend: backend.fail(reason))
        if self._thread.ident:
            self._thread.join(2 * LAST_SECONDS)

    def _call(self, function: Callable[[Backend], None]) -> None:
        if self.backend is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function, self.backend)

    def _service(self) -> routes.Service:
        assert self.backend is not None
        longest = min(self.prompts.longest, self.backend.tokens)
        prompts = replace(self.prompts, longest=longest)
        return routes.Service(self.backend, prompts, self.request.body, self.key, self.facts)

    async def _serve(self) -> None:
        self._loop, self.backend = asyncio.get_running_loop(), self._backend()
        config = uvicorn.Config(
            routes.app(self._service), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            limit_concurrency=CONNECTIONS, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=LAST_SECONDS,
            server_header=False,
        )  # fmt: skip
        server = uvicorn.Server(config)
        self._started.set()
        ending = asyncio.ensure_future(self._ends(server, self.backend))
        await server.serve(sockets=[self.listening])
        await ending

    async def _ends(self, server: uvicorn.Server, backend: Backend) -> None:
        await backend.drained.wait()
        server.should_exit = True
