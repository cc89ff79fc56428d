# SPDX-License-Identifier: Apache-2.0
"""The routes of a server: bodies are read up to a limit, checked, and answered."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.errors import reason
from tp_invariant_recipes.features.serve import bodies, metrics
from tp_invariant_recipes.features.serve.answers import Choices, Part, Sglang
from tp_invariant_recipes.features.serve.backend import Backend, Open, Refused
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.reading import TOKENS, parse_object

SMALL = 1 << 14  # bytes of a body that is parsed at once; another thread parses larger ones
BODY_SECONDS = 60  # that a client has for its body
RETRY_AFTER = 1  # seconds
WITHOUT_KEY = ("/health", "/metrics")
EVENTS = "text/event-stream"
KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Service:
    """What routes answer with. most: bytes of a body. key: None: every client may ask. facts: of the model."""

    backend: Backend
    prompts: Prompts
    most: int
    key: str | None
    facts: Mapping[str, Any]


def error(refused: Refused) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    status = refused.status
    body = {"message": str(refused), "type": KINDS.get(status, "server_error"), "param": refused.key, "code": status}
    headers = {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else {}
    if status in (408, 413, 503):
        headers["Connection"] = "close"  # the rest of a body is not read
    return JSONResponse({"error": body}, status, headers)


async def body_of(request: Request, most: int) -> dict[str, Any]:
    """Return the JSON object of a request; none: {}. Raises Refused: it is none, or too large, or comes too slowly."""
    announced = request.headers.get("content-length", "0")
    length = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream() if length <= 2 * most else _nothing():
                size += len(chunk)
                if size <= most:
                    data += chunk
                elif size > 2 * most:  # else a client that writes first would see no answer
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_SECONDS} s") from None
    if max(size, length) > most:
        raise Refused(413, f"a body of {max(size, length)} bytes or more is larger than {most} (--body)")
    if not data.strip():
        return {}
    try:
        return await _parsed(request, partial(parse_object, most=TOKENS), bytes(data))
    except ValueError as wrong:
        raise Refused(400, f"the body is not JSON that is taken here: {reason(wrong)}") from wrong


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


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


async def _completed(service: Service, opened: Sequence[Open]) -> None:
    """Wait for requests, and for the scores of their prompts. Raises Refused."""
    for each in opened:
        first, tokens = max(1, each.work.first or 0), [*each.work.request.tokens]
        if each.work.first is not None and first < len(tokens):
            lines, version = await service.backend.score([ScoredSequence(each.key, tokens, first)])
            each.scores = lines[0], version
        elif each.work.first is not None:
            each.scores = b"", each.version
    for each in opened:
        while not each.ended and each.problem is None:
            await each.changed.wait()
            each.changed.clear()
        if each.problem is not None:
            raise each.problem


async def _streamed(
    service: Service, opened: Sequence[Open], parts: Callable[[Open, int], list[Part]], last: Callable[[], list[Part]]
) -> AsyncIterator[bytes]:
    """Yield what has changed, as server-sent events. parts: of an open request and its place. last: of the end.

    A client that reads slowly gets fewer and longer parts.
    """
    try:
        over = False
        while not over:
            await opened[0].changed.wait()
            opened[0].changed.clear()
            over = all(each.ended for each in opened)
            if (problem := next((each.problem for each in opened if each.problem is not None), None)) is not None:
                yield _event(json.loads(bytes(error(problem).body)))
                return
            for place, each in enumerate(opened):
                for part in parts(each, place):
                    yield _event(part)
        for part in last():
            yield _event(part)
        yield b"data: [DONE]\n\n"
    finally:
        service.backend.leave(opened, told=False)


async def _parsed[T](request: Request, parse: Callable[..., T], *arguments: Any) -> T:
    """Parse a body, a large one in another thread."""
    length = request.headers.get("content-length", "")
    small = length.isdecimal() and len(length) < 6 and int(length) < SMALL
    return parse(*arguments) if small else await asyncio.to_thread(parse, *arguments)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _generate(service: Service, request: Request, body: dict[str, Any]) -> Response:
    works, given, params = await _parsed(request, service.prompts.generate, body)
    opened = service.backend.submit(works)
    form = Sglang(service.prompts.codec, given, params)
    several = isinstance(given.text, list) or bool(given.input_ids and isinstance(given.input_ids[0], list))
    if given.stream:
        parts = partial(form.changed, several=several or len(opened[0].samples) > 1)
        return StreamingResponse(_streamed(service, opened, parts, list), media_type=EVENTS)
    await answered(request, opened, service.backend, _completed(service, opened))
    answers = [part for place, each in enumerate(opened) for part in form.parts(each, place, several=False)]
    return JSONResponse(answers if several or len(answers) > 1 else answers[0])


async def _openai(kind: type[bodies.OpenAI], service: Service, request: Request, body: dict[str, Any]) -> Response:
    works, given = await _parsed(request, service.prompts.openai, kind, body)
    opened = service.backend.submit(works)
    form = Choices(service.prompts.codec, given, service.prompts.names[0], opened)
    if given.stream:
        return StreamingResponse(_streamed(service, opened, form.parts, form.last), media_type=EVENTS)
    await answered(request, opened, service.backend, _completed(service, opened))
    return JSONResponse(form.whole())


async def _score(service: Service, request: Request, body: dict[str, Any]) -> Response:
    sequences = await _parsed(request, service.prompts.score, body)
    lines, version = await answered(request, (), service.backend, service.backend.score(sequences))
    service.backend.metrics.add("tpi_scored_tokens_total", sum(len(each.tokens) - each.first for each in sequences))
    joined = b", ".join(line.strip() for line in lines)  # as `tpi score` writes them
    whole = b'{"weight_version": ' + json.dumps(version).encode() + b', "scores": [' + joined + b"]}"
    return Response(whole, media_type="application/json")


async def _update(service: Service, request: Request, body: dict[str, Any]) -> Response:
    given = bodies.checked(bodies.Update, body)
    update = service.backend.update(given.model_path, given.step, abort=given.abort_all_requests)
    await asyncio.shield(asyncio.ensure_future(update))  # it goes on where its client goes away
    return _done(service, "the weights are loaded")


async def _pause(service: Service, request: Request, body: dict[str, Any]) -> Response:
    service.backend.pause(bodies.checked(bodies.Pause, body).mode)
    return _done(service, "paused")


async def _continue(service: Service, request: Request, body: dict[str, Any]) -> Response:
    bodies.checked(bodies.Plain, body)
    service.backend.resume()
    return _done(service, "continued")


async def _flush(service: Service, request: Request, body: dict[str, Any]) -> Response:
    bodies.checked(bodies.Plain, body)
    service.backend.flush()
    return _done(service, "flushed")


async def _abort(service: Service, request: Request, body: dict[str, Any]) -> Response:
    given = bodies.checked(bodies.Abort, body)
    if (given.rid is None) == (not given.abort_all):
        raise Refused(400, "rid, abort_all: either an id, or true", "rid")
    opened = [each for each in service.backend.open.values() if given.abort_all or each.work.request.id == given.rid]
    service.backend.leave(opened, told=True)
    return _done(service, f"{len(opened)} aborted")


def _done(service: Service, message: str) -> Response:
    version = service.backend.weights.version
    return JSONResponse({"success": True, "message": message, "status": "ok", "weight_version": version})


async def _health(service: Service, request: Request, body: dict[str, Any]) -> Response:
    service.backend.check()
    return _done(service, service.backend.state)


async def _health_generate(service: Service, request: Request, body: dict[str, Any]) -> Response:
    body = {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    opened = service.backend.submit(service.prompts.generate(body)[0])
    await answered(request, opened, service.backend, _completed(service, opened))
    return _done(service, "a token was drawn")


async def _model_info(service: Service, request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({**service.facts["model"], "weight_version": service.backend.weights.version})


async def _server_info(service: Service, request: Request, body: dict[str, Any]) -> Response:
    return JSONResponse({**service.facts["model"], **service.facts["server"], **service.backend.facts()})


async def _models(service: Service, request: Request, body: dict[str, Any]) -> Response:
    data = {"id": service.prompts.names[0], "object": "model", "created": 0, "owned_by": "tpi"}
    more = {"max_model_len": service.prompts.longest, "weight_version": service.backend.weights.version}
    return JSONResponse({"object": "list", "data": [data | more]})


async def _metrics(service: Service, request: Request, body: dict[str, Any]) -> Response:
    backend = service.backend
    count = sum(len(each.samples) for each in backend.open.values())
    return PlainTextResponse(backend.metrics.text(count, backend.weights.version), media_type=metrics.CONTENT_TYPE)


Handler = Callable[[Service, Request, dict[str, Any]], Awaitable[Response]]
POST: dict[str, Handler] = {
    "/generate": _generate, "/v1/completions": partial(_openai, bodies.Completions),
    "/v1/chat/completions": partial(_openai, bodies.Chat), "/score": _score, "/update_weights_from_disk": _update,
    "/pause_generation": _pause, "/continue_generation": _continue, "/flush_cache": _flush, "/abort_request": _abort,
}  # fmt: skip
GET: dict[str, Handler] = {
    "/health": _health, "/health_generate": _health_generate, "/v1/models": _models, "/metrics": _metrics,
    **dict.fromkeys(("/get_model_info", "/model_info"), _model_info),
    **dict.fromkeys(("/get_server_info", "/server_info"), _server_info),
}  # fmt: skip


def app(service: Callable[[], Service]) -> Starlette:
    """Return the routes. service: what there is once the server runs."""
    routes = [Route(path, partial(_endpoint, service, path, POST[path]), methods=["POST"]) for path in POST]
    routes += [Route(path, partial(_endpoint, service, path, GET[path]), methods=["GET"]) for path in GET]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


async def _no_route(request: Request, wrong: Exception) -> Response:
    status = wrong.status_code if isinstance(wrong, HTTPException) else 500
    return error(Refused(status, f"{request.method} {request.url.path}: there is no such route"))


async def _endpoint(service: Callable[[], Service], path: str, handler: Handler, request: Request) -> Response:
    begun, now = time.monotonic(), service()
    try:
        response = await _response(now, path, handler, request)
    except Refused as refused:
        response = error(refused)
    except ClientDisconnect:
        response = Response(status_code=499)  # nobody reads it
    except Exception as defect:  # the server lives, and the client learns what failed
        response = error(Refused(500, f"a defect of tpi: {type(defect).__name__}: {reason(defect)}"))
    now.backend.metrics.add("tpi_requests_total", route=path, status=str(response.status_code))
    now.backend.metrics.add("tpi_request_seconds_total", time.monotonic() - begun, route=path)
    return response


async def _response(service: Service, path: str, handler: Handler, request: Request) -> Response:
    if service.key is not None and path not in WITHOUT_KEY:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), service.key.encode()):
            raise Refused(401, "the key of --api-key-file is missing: Authorization: Bearer KEY")
    if path not in POST:
        return await handler(service, request, {})
    service.backend.check()
    return await handler(service, request, await body_of(request, service.most))
