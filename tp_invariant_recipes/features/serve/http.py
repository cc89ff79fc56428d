# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of `tpi serve`, in a thread of its own beside the launcher of the ranks."""

import asyncio
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from typing import Any

import uvicorn

from tp_invariant_recipes.features.serve.routes import Service, app

CONNECTIONS = 4096  # at most; uvicorn answers 503 to more
KEEP_ALIVE = 75  # seconds that a connection may be idle between requests
LAST_SECONDS = 3  # that clients have to read their answers at the end


class Http:
    """Answers requests until `end`. listening: the socket."""

    def __init__(self, listening: socket, service: Service) -> None:
        self.listening, self.service, self.backend = listening, service, service.backend
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start to answer. It is called again and again."""
        if self._loop is None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY:
                most = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * CONNECTIONS)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            self._loop = asyncio.new_event_loop()
            self._thread.start()
        elif not self._thread.is_alive() and not self.backend.drained.is_set():
            raise RuntimeError("the HTTP thread has ended")

    def drain(self) -> None:
        """Take no new requests, and end the ranks when the last open one has ended."""
        self._call(self.backend.drain)

    def end(self, reason: str) -> None:
        """Answer what is open with an error, and end."""
        self._call(self.backend.fail, reason)
        if self._thread.ident:
            self._thread.join(2 * LAST_SECONDS)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.run(self._serve(), loop_factory=lambda: loop)

    async def _serve(self) -> None:
        self.backend.start()
        config = uvicorn.Config(
            app(self.service), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            limit_concurrency=CONNECTIONS, timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=LAST_SECONDS,
            server_header=False,
        )  # fmt: skip
        server = uvicorn.Server(config)

        async def ending() -> None:
            await self.backend.drained.wait()
            server.should_exit = True

        ends = asyncio.ensure_future(ending())
        await server.serve(sockets=[self.listening])
        await ends
