# SPDX-License-Identifier: Apache-2.0
"""The routes of a server: bodies are read up to a limit, checked, and answered."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.errors import reason
from tp_invariant_recipes.features.serve import bodies, metrics
from tp_invariant_recipes.features.serve.answers import OpenAI, Sglang
from tp_invariant_recipes.features.serve.backend import Backend, Open, Refused, Work
from tp_invariant_recipes.features.serve.bodies import Prompts
from tp_invariant_recipes.reading import MIB, TOKENS, parse_object

LARGE = MIB // 4  # bytes of a body that another thread parses
BODY_SECONDS = 60  # that a client has for its body
RETRY_AFTER = 1  # seconds
OPEN_ROUTES = ("/health", "/metrics")  # that need no key
KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Service:
    """What routes answer with. most: bytes of a body. key: None: every client may ask. facts: of the model."""

    backend: Backend
    prompts: Prompts
    most: int
    key: str | None
    facts: Mapping[str, Any]


def error(status: int, message: str, key: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    body = {"message": message, "type": KINDS.get(status, "server_error"), "param": key, "code": status}
    headers = {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else {}
    if status in (408, 413, 503):
        headers["Connection"] = "close"  # the rest of a body is not read
    return JSONResponse({"error": body}, status, headers)


async def body_of(request: Request, most: int) -> dict[str, Any]:
    """Return the JSON object of a request; none: {}. Raises Refused: it is none, or too large, or comes too slowly."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise Refused(413, f"a body of {announced} bytes is larger than {most} (--body)")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > most:
                    raise Refused(413, f"a body of more than {most} bytes (--body)")
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_SECONDS} s") from None
    if not data.strip():
        return {}
    try:
        if len(data) > LARGE:
            return await asyncio.to_thread(parse_object, bytes(data), most=TOKENS)
        return parse_object(bytes(data), most=TOKENS)
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


async def _completed(service: Service, opened: Sequence[Open]) -> None:
    """Wait for requests, and for the scores of their prompts."""

    async def scored(each: Open) -> None:
        first = max(1, each.work.first or 0)
        tokens = [*each.work.request.tokens]
        lines, version = [b""], service.backend.weights.version
        if first < len(tokens):
            lines, version = await service.backend.score([ScoredSequence(each.key, tokens, first)])
        each.scores = lines[0], version

    waits = [each.wait() for each in opened]
    await asyncio.gather(*waits, *(scored(each) for each in opened if each.work.first is not None))


async def _streamed(
    service: Service, opened: Sequence[Open], parts: Callable[[Open], list[dict[str, Any]]], last: Sequence[Any] = ()
) -> AsyncIterator[bytes]:
    """Yield what has changed, as server-sent events. parts: of an open request. last: of its end."""
    queue: asyncio.Queue[Open] = asyncio.Queue()

    async def watch(each: Open) -> None:
        while not each.ended and each.problem is None:
            await each.news()
            await queue.put(each)

    watches = [asyncio.ensure_future(watch(each)) for each in opened]
    try:
        while any(not task.done() for task in watches) or not queue.empty():
            each = await queue.get()
            if each.problem is not None:
                yield _event(json.loads(bytes(error(each.problem.status, str(each.problem)).body)))
                return
            for part in parts(each):
                yield _event(part)
        for part in last:
            yield _event(part() if callable(part) else part)
        yield b"data: [DONE]\n\n"
    finally:
        for task in watches:
            task.cancel()
        service.backend.leave(opened, told=False)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def generate(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /generate."""
    works, given, single = await _parsed(body, bodies.generate, service.prompts)
    if works[0].stream and works[0].first is not None and works[0].first >= 0:
        raise Refused(400, "logprob_start_len: has no effect with stream; /score scores a prompt", "logprob_start_len")
    opened = service.backend.submit(works)
    form = Sglang(service.prompts.codec, given)
    place = {each.key: n for n, each in enumerate(opened)}

    def forms(each: Open) -> list[dict[str, Any]]:
        return [form(each, n, service.backend.weights.version) for n in range(len(each.samples))]

    if works[0].stream:
        several = len(opened) > 1 or len(opened[0].samples) > 1

        def parts(each: Open) -> list[dict[str, Any]]:
            first = place[each.key] * len(each.samples)
            return [one | ({"index": first + n} if several else {}) for n, one in enumerate(forms(each))]

        return StreamingResponse(_streamed(service, opened, parts), media_type="text/event-stream")
    await answered(request, opened, service.backend, _completed(service, opened))
    answers = [one for each in opened for one in forms(each)]
    return JSONResponse(answers[0] if single and len(answers) == 1 else answers)


async def _parsed[T](body: dict[str, Any], parse: Callable[[Mapping[str, Any], Prompts], T], prompts: Prompts) -> T:
    """Parse a body in another thread: tokenizers and long lists take their time."""
    return await asyncio.to_thread(parse, body, prompts)


def _openai(parse: Callable[..., tuple[list[Work], dict[str, Any]]], *, chat: bool) -> Callable[..., Any]:
    async def answer(service: Service, request: Request, body: dict[str, Any]) -> Response:
        works, given = await _parsed(body, parse, service.prompts)
        opened = service.backend.submit(works)
        form = OpenAI(service.prompts.codec, given, service.prompts.names[0], chat=chat)
        if works[0].stream:
            return StreamingResponse(_openai_stream(service, opened, form), media_type="text/event-stream")
        await answered(request, opened, service.backend, _completed(service, opened))
        return JSONResponse(form.whole(opened, service.backend.weights.version))

    return answer


def _openai_stream(service: Service, opened: Sequence[Open], form: OpenAI) -> AsyncIterator[bytes]:
    head = {"id": opened[0].work.request.id, **form.head}
    if form.chat:
        head["object"] = "chat.completion.chunk"
    indices = {each.key: n * len(each.samples) for n, each in enumerate(opened)}
    sent: dict[tuple[str, int], tuple[int, int]] = {}

    def parts(each: Open) -> list[dict[str, Any]]:
        found = []
        for n, sample in enumerate(each.samples):
            start, shown = sent.get((each.key, n), (0, 0))
            if start < 0 or (len(sample.tokens) == start and sample.reason is None):
                continue
            choice = form.choice(
                each, n, indices[each.key] + n, service.backend.weights.version, start, shown, part=True
            )
            text = choice["delta"]["content"] if form.chat else choice["text"]
            if sample.reason is None and text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue  # half a character, whose other half comes
            sent[each.key, n] = (-1, 0) if sample.reason else (len(sample.tokens), shown + len(text))
            found.append(head | {"choices": [choice]})
        return found

    usage = [lambda: head | {"choices": [], "usage": form.usage(opened)}] if form.given["include_usage"] else []
    return _streamed(service, opened, parts, usage)


async def score(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /score with the lines of `tpi score`."""
    encoded = lambda row: json.dumps(row).encode()  # noqa: E731
    sequences = await asyncio.to_thread(bodies.score, body, service.prompts, encoded)
    lines, version = await answered(request, (), service.backend, service.backend.score(sequences))
    service.backend.metrics.add("tpi_scored_tokens_total", sum(len(each.tokens) - each.first for each in sequences))
    joined = b", ".join(line.strip() for line in lines)
    whole = b'{"weight_version": ' + json.dumps(version).encode() + b', "scores": [' + joined + b"]}"
    return Response(whole, media_type="application/json")


async def update(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /update_weights_from_disk."""
    given = bodies.check(body, bodies.UPDATE)
    if "model_path" not in given:
        raise Refused(400, "model_path: is missing", "model_path")
    abort = given.get("abort_all_requests", False)
    begun = asyncio.ensure_future(
        service.backend.update(given["model_path"], given.get("step"), abort=abort)
    )  # it goes on where its client goes away
    await asyncio.shield(begun)
    version = service.backend.weights.version
    return JSONResponse(
        {"success": True, "message": "the weights are loaded", "num_paused_requests": 0, "weight_version": version}
    )


async def pause(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /pause_generation."""
    service.backend.pause(bodies.check(body, bodies.PAUSE).get("mode", "abort"))
    return _done(service, "paused")


async def resume(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /continue_generation."""
    bodies.check(body, bodies.CONTINUE)
    service.backend.check()
    service.backend.resume()
    return _done(service, "continued")


async def flush(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /flush_cache."""
    bodies.check(body, bodies.EMPTY)
    service.backend.flush()
    return _done(service, "flushed")


async def abort(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /abort_request: the requests end with what they have."""
    given = bodies.check(body, bodies.ABORT_KEYS)
    if ("rid" in given) == bool(given.get("abort_all")):
        raise Refused(400, "either rid, or abort_all=true", "rid")
    opened = [*service.backend.open.values()]
    service.backend.leave(
        [each for each in opened if given.get("abort_all") or each.work.request.id == given["rid"]], told=True
    )
    return _done(service, "aborted")


def _done(service: Service, message: str) -> Response:
    return JSONResponse(
        {"success": True, "message": message, "status": "ok", "weight_version": service.backend.weights.version}
    )


async def health(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /health: 200 where requests are taken."""
    service.backend.check()
    return _done(service, service.backend.state)


async def health_generate(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /health_generate: a token is drawn."""
    work = bodies.generate(
        {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}, service.prompts
    )
    opened = service.backend.submit(work[0])
    await answered(request, opened, service.backend, _completed(service, opened))
    return _done(service, "a token was drawn")


async def model_info(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /get_model_info."""
    return JSONResponse({**service.facts["model"], "weight_version": service.backend.weights.version})


async def server_info(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /get_server_info."""
    return JSONResponse({**service.facts["model"], **service.facts["server"], **service.backend.facts()})


async def models(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /v1/models."""
    data = {"id": service.prompts.names[0], "object": "model", "created": 0, "owned_by": "tpi"}
    more = {"max_model_len": service.prompts.longest, "weight_version": service.backend.weights.version}
    return JSONResponse({"object": "list", "data": [data | more]})


async def metrics_text(service: Service, request: Request, body: dict[str, Any]) -> Response:
    """Answer /metrics."""
    backend = service.backend
    count = sum(len(each.samples) for each in backend.open.values())
    return PlainTextResponse(backend.metrics.text(count, backend.weights.version), media_type=metrics.CONTENT_TYPE)


Handler = Callable[[Service, Request, dict[str, Any]], Awaitable[Response]]
# Path -> method, and what answers it.
ROUTES: dict[str, tuple[str, Handler]] = {
    "/generate": ("POST", generate),
    "/v1/completions": ("POST", _openai(bodies.completions, chat=False)),
    "/v1/chat/completions": ("POST", _openai(bodies.chat, chat=True)),
    "/score": ("POST", score),
    "/update_weights_from_disk": ("POST", update),
    "/pause_generation": ("POST", pause),
    "/continue_generation": ("POST", resume),
    "/flush_cache": ("POST", flush),
    "/abort_request": ("POST", abort),
    "/health": ("GET", health),
    "/health_generate": ("GET", health_generate),
    **dict.fromkeys(("/get_model_info", "/model_info"), ("GET", model_info)),
    **dict.fromkeys(("/get_server_info", "/server_info"), ("GET", server_info)),
    "/v1/models": ("GET", models),
    "/metrics": ("GET", metrics_text),
}


def app(service: Callable[[], Service]) -> Starlette:
    """Return the routes. service: what there is once the server runs."""

    def endpoint(path: str, method: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            begun, current = time.monotonic(), service()
            response = await _handled(current, request, path, method, handler)
            current.backend.metrics.add("tpi_requests_total", route=path, status=str(response.status_code))
            current.backend.metrics.add("tpi_request_seconds_total", time.monotonic() - begun, route=path)
            return response

        return answer

    def unknown(request: Request, wrong: Exception) -> Response:
        status = wrong.status_code if isinstance(wrong, HTTPException) else 500
        return error(status, f"{request.method} {request.url.path}: there is no such route")

    routes = [Route(path, endpoint(path, *row), methods=[row[0]]) for path, row in ROUTES.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: unknown})


async def _handled(service: Service, request: Request, path: str, method: str, handler: Handler) -> Response:
    try:
        if service.key is not None and path not in OPEN_ROUTES:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), service.key.encode()):
                return error(401, "the key of --api-key-file is missing: Authorization: Bearer KEY")
        if method == "POST":
            service.backend.check()
        body = await body_of(request, service.most) if method == "POST" else {}
        return await handler(service, request, body)
    except Refused as refused:
        return error(refused.status, str(refused), refused.key)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as defect:  # the server lives, and the client learns what failed
        return error(500, f"a defect of tpi: {type(defect).__name__}: {reason(defect)}")
