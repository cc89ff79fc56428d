# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of `tpi serve`: bodies are read up to a limit, checked, and answered."""

import asyncio
import hmac
import json
import resource
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from socket import socket
from typing import Any

import uvicorn
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.errors import reason
from tp_invariant_recipes.features.serve import answers, bodies
from tp_invariant_recipes.features.serve.answers import Answer
from tp_invariant_recipes.features.serve.backend import Backend, Open, Refused
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.reading import TOKENS, parse_object

BODY_SECONDS = 60  # that a client has for its body
RETRY_AFTER = 1  # seconds
CONNECTIONS = 4096  # at most; uvicorn answers 503 to more
KEEP_ALIVE = 75  # seconds that a connection may be idle between requests
LAST_SECONDS = 3  # that clients have to read their answers at the end
WITHOUT_KEY = ("/health", "/metrics")
KINDS = {404: "not_found_error", 429: "rate_limit_error"}
METRICS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Service:
    """What routes answer with. most: bytes of a body. key: None: every client may ask. model, server: facts."""

    backend: Backend
    prompts: Prompts
    most: int
    key: str | None
    model: Mapping[str, Any]
    server: Mapping[str, Any]

    @property
    def fitting(self) -> Prompts:
        """What bodies are read with: the cache may be shorter than the positions of the model."""
        return replace(self.prompts, longest=min(self.prompts.longest, self.backend.tokens))


def problem_of(refused: Refused) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.key, "code": refused.status}}


def error(refused: Refused) -> JSONResponse:
    """Return the answer of a request that is refused."""
    headers = {"Retry-After": str(RETRY_AFTER)} if refused.status in (429, 503) else {}
    if refused.status in (408, 413, 503):
        headers["Connection"] = "close"  # the rest of a body is not read
    return JSONResponse(problem_of(refused), refused.status, headers)


async def body_of(request: Request, most: int) -> dict[str, Any]:
    """Return the JSON object of a request; none: {}. Raises Refused: it is none, or too large, or comes too slowly."""
    announced = request.headers.get("content-length", "0")
    length = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if length <= 2 * most:  # a client that writes first reads no answer while it writes
                async for chunk in request.stream():
                    size += len(chunk)
                    data += chunk if size <= most else b""
                    if size > 2 * most:
                        break
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_SECONDS} s") from None
    if max(size, length) > most:
        raise Refused(413, f"a body of {max(size, length)} bytes or more is larger than {most} (--body)")
    if not data.strip():
        return {}
    try:
        return await asyncio.to_thread(parse_object, bytes(data), most=TOKENS)  # a large one takes seconds
    except ValueError as wrong:
        raise Refused(400, f"the body is not JSON that is taken here: {reason(wrong)}") from wrong


async def answered[T](request: Request, opened: Sequence[Open], backend: Backend, result: Awaitable[T]) -> T:
    """Return a result, unless the client goes away, whose requests end then. Raises Refused, ClientDisconnect."""
    task = asyncio.ensure_future(result)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        backend.leave(opened, told=False)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _completed(backend: Backend, opened: Sequence[Open], first: int | None) -> None:
    """Wait for requests, and for the scores of their prompts from the first on. Raises Refused."""
    if first is not None:
        prompts = [ScoredSequence(each.key, [*each.request.tokens], max(1, first)) for each in opened]
        scored = await backend.score([each for each in prompts if each.first < len(each.tokens)])
        lines = iter(scored.lines)
        for each, prompt in zip(opened, prompts, strict=True):
            each.scores = next(lines) if prompt.first < len(prompt.tokens) else b"", scored.version
    for each in opened:
        while not each.ended and each.problem is None:
            await each.changed.wait()
            each.changed.clear()
        if each.problem is not None:
            raise each.problem


async def _streamed(backend: Backend, answer: Answer) -> AsyncIterator[bytes]:
    """Yield what has changed, as server-sent events. A client that reads slowly gets fewer and longer parts."""
    opened, over = answer.opened, False
    try:
        while not over:
            await opened[0].changed.wait()
            opened[0].changed.clear()
            over = all(each.ended for each in opened)
            if (problem := next((each.problem for each in opened if each.problem is not None), None)) is not None:
                yield _event(problem_of(problem))
                return
            for part in answer.changed():
                yield _event(part)
        for part in answer.last():
            yield _event(part)
        yield b"data: [DONE]\n\n"
    finally:
        backend.leave(opened, told=False)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _complete(kind: Any, form: type[Answer], service: Service, request: Request, body: Any) -> Response:
    """Answer a route that completes prompts. kind: of its body. form: of its answer."""
    backend = service.backend
    asked = await asyncio.to_thread(service.fitting.asked, kind, body)
    opened = backend.submit(asked.requests, stream=asked.body.stream)
    answer = form(service.prompts.codec, asked, opened, service.prompts.names[0])
    if asked.body.stream:
        return StreamingResponse(_streamed(backend, answer), media_type="text/event-stream")
    await answered(request, opened, backend, _completed(backend, opened, asked.body.first))
    return Response(to_json(answer.whole()), media_type="application/json")  # json takes four times as long


async def _score(service: Service, request: Request, body: Any) -> Response:
    sequences = await asyncio.to_thread(service.fitting.score, body)
    answer = await answered(request, (), service.backend, service.backend.score(sequences))
    joined = b", ".join(line.strip() for line in answer.lines)  # as `tpi score` writes them
    whole = b'{"weight_version": ' + json.dumps(answer.version).encode() + b', "scores": [' + joined + b"]}"
    return Response(whole, media_type="application/json")


async def _health_generate(service: Service, request: Request, body: Any) -> Response:
    if service.backend.paused:
        raise Refused(503, "generation is paused; /continue_generation makes passes again")
    await _complete(bodies.Generate, answers.Sglang, service, request, HEALTH)
    return JSONResponse(DONE)


async def _metrics(service: Service, request: Request, body: Any) -> Response:
    return PlainTextResponse(service.backend.metrics(), media_type=METRICS)


async def _act(
    kind: Any, act: Callable[[Service, Any], Any], service: Service, request: Request, body: Any
) -> Response:
    """Do what a body asks for, also where its client goes away. Answers what that gives, and the weights' version."""
    result = act(service, bodies.checked(kind, body))
    result = await asyncio.shield(asyncio.ensure_future(result)) if asyncio.iscoroutine(result) else result
    return JSONResponse({**(result or DONE), "weight_version": service.backend.weights.version})


def _update(service: Service, given: Any) -> Awaitable[None]:
    return service.backend.update(given.model_path, given.step, abort=given.abort_all_requests)


def _models(service: Service, _: Any) -> dict[str, Any]:
    data = {"id": service.prompts.names[0], "object": "model", "created": 0, "owned_by": "tpi"}
    return {"object": "list", "data": [data | {"max_model_len": service.fitting.longest}]}


def _server(service: Service, _: Any) -> dict[str, Any]:
    return {**service.model, **service.server, **service.backend.facts()}


HEALTH = {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
DONE = {"success": True, "message": "done", "status": "ok"}
Handler = Callable[[Service, Request, Any], Awaitable[Response]]
POST: dict[str, Handler] = {
    "/generate": partial(_complete, bodies.Generate, answers.Sglang),
    "/v1/completions": partial(_complete, bodies.Completions, answers.OpenAI),
    "/v1/chat/completions": partial(_complete, bodies.Chat, answers.OpenAI),
    "/score": _score,
    "/update_weights_from_disk": partial(_act, bodies.Update, _update),
    "/pause_generation": partial(_act, bodies.Pause, lambda of, given: of.backend.pause(abort=given.mode == "abort")),
    "/continue_generation": partial(_act, bodies.Body, lambda of, _: of.backend.resume()),
    "/flush_cache": partial(_act, bodies.Body, lambda of, _: of.backend.flush()),
    "/abort_request": partial(_act, bodies.Abort, lambda of, given: of.backend.abort(given.rid, all=given.abort_all)),
}
GET: dict[str, Handler] = {
    "/health": partial(_act, bodies.Body, lambda of, _: of.backend.check()),
    "/health_generate": _health_generate,
    "/v1/models": partial(_act, bodies.Body, _models),
    "/metrics": _metrics,
    **dict.fromkeys(("/get_model_info", "/model_info"), partial(_act, bodies.Body, lambda of, _: of.model)),
    **dict.fromkeys(("/get_server_info", "/server_info"), partial(_act, bodies.Body, _server)),
}


def app(service: Service) -> Starlette:
    """Return the routes."""
    methods = (("POST", POST), ("GET", GET))
    routes = [
        Route(path, partial(_endpoint, service, path, handler), methods=[method])
        for method, handlers in methods
        for path, handler in handlers.items()
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, wrong: Exception) -> Response:
    status = wrong.status_code if isinstance(wrong, HTTPException) else 500
    return error(Refused(status, f"{request.method} {request.url.path:.80}: there is no such route"))


async def _endpoint(service: Service, path: str, handler: Handler, request: Request) -> Response:
    begun, backend = time.monotonic(), service.backend
    try:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        known = kind.lower() == "bearer" and hmac.compare_digest(given.encode(), (service.key or "").encode())
        if service.key is not None and path not in WITHOUT_KEY and not known:
            raise Refused(401, "the key of --api-key-file is missing: Authorization: Bearer KEY")
        if path in POST:
            backend.check()
        response = await handler(service, request, await body_of(request, service.most) if path in POST else {})
    except Refused as refused:
        response = error(refused)
    except ClientDisconnect:
        response = Response(status_code=499)  # nobody reads it
    except Exception as defect:  # the server lives, and the client learns what failed
        response = error(Refused(500, f"a defect of tpi: {type(defect).__name__}: {reason(defect)}"))
    backend.count("tpi_requests_total", route=path, status=str(response.status_code))
    backend.count("tpi_request_seconds_total", time.monotonic() - begun, route=path)
    return response


class Http:
    """Answers requests until `end`, in a thread beside the launcher of the ranks. listening: the socket."""

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
            app(self.service), log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
            http="h11", limit_concurrency=CONNECTIONS, timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=LAST_SECONDS, server_header=False,
        )  # fmt: skip
        server = uvicorn.Server(config)

        async def ending() -> None:
            await self.backend.drained.wait()
            server.should_exit = True

        ends = asyncio.ensure_future(ending())
        await server.serve(sockets=[self.listening])
        await ends
