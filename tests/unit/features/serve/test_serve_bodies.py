# SPDX-License-Identifier: Apache-2.0
"""Wrong requests: each gets one clear error that names the key, and the server answers the next request."""

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from tests.source_trees import PROJECT
from tests.unit.features.serve.fake_ranks import SLOW, served
from tp_invariant_recipes.features.serve import bodies
from tp_invariant_recipes.features.serve import http as server_

pytest.importorskip("uvicorn")

MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with served(body=MIB, queue=64) as parts:
        yield parts


def good(client) -> bool:
    answer = client.post("/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
    return answer.status_code == 200 and answer.json()["output_ids"] == [5, 6]


def greedy(**keys):
    return {"input_ids": [5], "sampling_params": keys}


G, C, T = "/generate", "/v1/completions", "/v1/chat/completions"
U, S = "/update_weights_from_disk", "/score"
# Route, body, status, key that the error names, part of the message.
WRONG = (
    (G, {"input_ids": [5], "temperature": 1}, 400, "temperature", "no such key"),
    (G, {"input_ids": [5], "return_logprobs": True}, 400, "return_logprobs", "did you mean 'return_logprob'"),
    (G, {}, 400, "input_ids", "one of both"),
    (G, {"input_ids": [5], "text": "a"}, 400, "input_ids", "one of both"),
    (G, {"input_ids": "5"}, 400, "input_ids", "list"),
    (G, {"input_ids": [[5], "a"]}, 200, None, ""),
    (G, {"input_ids": []}, 400, None, "empty prompt"),
    (G, {"input_ids": [[5], []]}, 400, None, "empty prompt"),
    (G, {"text": ""}, 400, None, "empty prompt"),
    (G, {"input_ids": [512]}, 400, None, "token 512 is outside the model's vocabulary of 512"),
    (G, {"input_ids": [-1]}, 400, None, "token -1 is outside"),
    (G, {"input_ids": [1 << 70]}, 400, None, "is outside"),
    (G, {"input_ids": [True]}, 400, "input_ids", "token ids"),
    (G, {"input_ids": [5.0]}, 400, "input_ids", "token ids"),
    (G, {"input_ids": [[[5]]]}, 400, "input_ids", "token ids"),
    (G, {"input_ids": [1] * 300_000}, 400, None, "are more than the 4096"),
    (G, greedy(max_new_tokens=1 << 70), 400, "sampling_params.max_new_tokens", "less than"),
    (G, greedy(max_new_tokens=0), 400, "sampling_params.max_new_tokens", "greater than or equal to 1"),
    (G, greedy(max_new_tokens=5000), 400, None, "are more than the 4096"),
    (G, greedy(max_new_tokens=True), 400, "sampling_params.max_new_tokens", "integer"),
    (G, greedy(temperature="1"), 400, "sampling_params.temperature", "number"),
    (G, greedy(temperature=-1), 400, "sampling_params.temperature", "must be 0 or from 1e-6"),
    (G, greedy(temperature=1e-9), 400, "sampling_params.temperature", "must be 0 or from 1e-6"),
    (G, greedy(top_p=0), 400, "sampling_params.top_p", "greater than 0"),
    (G, greedy(top_k=-2), 400, "sampling_params.top_k", "-1"),
    (G, greedy(temperature=0, top_p=0.5), 400, "top_p", "has no effect with temperature=0"),
    (G, greedy(temperature=0, sampling_seed=3), 400, "seed", "has no effect with temperature=0"),
    (G, greedy(temperature=0, n=2), 400, "n", "has no effect with temperature=0"),
    (G, greedy(sampling_seed=-1), 400, "sampling_params.sampling_seed", "greater than or equal to 0"),
    (G, greedy(stop=[]), 200, None, ""),
    (G, greedy(stop=""), 400, "sampling_params.stop", "at least 1 character"),
    (G, greedy(stop=["x"] * 100_000), 400, "sampling_params.stop", "at most 64"),
    (G, greedy(stop_token_ids=[512]), 400, None, "512 is outside"),
    (G, greedy(min_p=0.1), 400, "sampling_params.min_p", "has no effect here; leave it out, or 0"),
    (G, greedy(regex="a"), 400, "sampling_params.regex", "no such key"),
    (G, greedy(best_of=2), 400, "sampling_params.best_of", "has no effect here; leave it out, or 1"),
    (G, {"input_ids": [5], "sampling_params": []}, 400, "sampling_params", "0 for 1 prompts"),
    (G, {"input_ids": [5], "sampling_params": 3}, 400, "sampling_params.body", "dictionary"),
    (G, {"input_ids": [5], "lora_path": "x"}, 400, "lora_path", "no such key"),
    (G, {"input_ids": [5], "top_logprobs_num": 2}, 400, "top_logprobs_num", "has no effect here; leave it out, or 0"),
    (G, {"input_ids": [5], "logprob_start_len": 0}, 400, "logprob_start_len", "without return_logprob"),
    (G, {"input_ids": [[5], [6]], "rid": ["a"]}, 400, "rid", "1 ids for 2 prompts"),
    (G, {"input_ids": [5], "rid": 3}, 400, "rid", "valid string"),
    (G, {"input_ids": [[5]] * 65}, 413, None, "65 completions are more than the 64"),
    (G, greedy(n=65), 413, None, "65 completions"),
    (G, b'{"input_ids": [5]', 400, None, "not JSON"),
    (G, b'{"input_ids": [5], "input_ids": [6]}', 400, None, "a key appears twice"),
    (G, b'{"input_ids": [5], "sampling_params": {"temperature": NaN}}', 400, None, "NaN is not JSON"),
    (
        G,
        b'{"input_ids": [5], "sampling_params": {"temperature": 1e999}}',
        400,
        "sampling_params.temperature",
        "must be 0",
    ),
    (G, b'{"input_ids": [' + b"1" * 5000 + b"]}", 400, None, "not JSON"),
    (G, b"[5]", 400, None, "not an object"),
    (G, b"[" * 100_000, 400, None, "not JSON"),
    (G, b'{"text": "\\ud800"}', 400, None, "half a character"),
    (G, b"\xff\xfe", 400, None, "not JSON"),
    (G, b" " * (MIB + 1), 413, None, "is larger than 1048576 (--body)"),
    (C, {"prompt": None}, 400, "prompt", "must be a list of token ids"),
    (C, {"prompt": [5], "model": "other"}, 404, "model", "the server has fake"),
    (C, {"prompt": [5], "logprobs": 5}, 400, "logprobs", "less than or equal to 1"),
    (C, {"prompt": [5], "seed": "3"}, 400, "seed", "integer"),
    (C, {"prompt": [5], "echo": True}, 400, "echo", "has no effect here; leave it out, or false"),
    (C, {"prompt": [5], "logit_bias": {"5": 1}}, 400, "logit_bias", "has no effect here; leave it out, or {}"),
    (C, {"prompt": [5], "stream_options": {"include_usage": True}}, 400, "stream_options", "without stream"),
    (C, {"prompt": [5], "rid": "a", "request_id": "b"}, 400, "request_id", "no such key"),
    (T, {}, 400, "messages", "required"),
    (T, {"messages": []}, 400, "messages", "chat template"),
    (T, {"messages": [], "tools": [{}]}, 400, "tools", "has no effect here; leave it out, or []"),
    (
        T,
        {"messages": [], "max_tokens": 3, "max_completion_tokens": 3},
        400,
        "max_tokens",
        "did you mean 'max_completion_tokens'",
    ),
    (U, {}, 400, "model_path", "required"),
    (U, {"model_path": 3}, 400, "model_path", "string"),
    (U, {"model_path": "wide"}, 400, "model_path", "hidden_size"),
    (U, {"model_path": "x" * 5000}, 400, "model_path", "File name too long"),
    (U, {"model_path": "nan"}, 400, "model_path", "the weights are those of before"),
    (U, {"model_path": "v1", "weight_version": "7"}, 400, "weight_version", "no such key"),
    ("/pause_generation", {"mode": "stop"}, 400, "mode", "'abort', 'retract' or 'in_place'"),
    ("/abort_request", {}, 400, "rid", "either"),
    ("/abort_request", {"rid": "a", "abort_all": True}, 400, "rid", "either"),
    ("/flush_cache", {"all": True}, 400, "all", "no such key"),
    (S, {"tokens": [5]}, 400, "sequences", "no token to score"),
    (S, {"tokens": [5, 512]}, 400, "sequences", "512 is outside"),
    (S, {"sequences": []}, 400, "sequences", "at least one"),
    (S, {"sequences": [{"tokens": [5, 6]}], "tokens": [5, 6]}, 400, "sequences", "no other key"),
    (S, {"sequences": [3]}, 400, "sequences", "is no object"),
    (S, {"sequences": [{"tokens": [5, 6], "weights": 1}]}, 400, "weights", "is no object with keys"),
    (S, {"input_ids": [5, 6]}, 400, "input_ids", "is no object with keys"),
    (S, {"tokens": [5] * 5000}, 400, "sequences", "at most 4096"),
    ("/nowhere", {}, 404, None, "no such route"),
    (f"/{'a' * 9000}", {}, 404, None, "a: there is no such route"),
    ("/health", {}, 405, None, "no such route"),
)


@pytest.mark.parametrize("route, body, status, key, text", WRONG)
def test_a_wrong_body_is_one_clear_error(server, route, body, status, key, text):
    client, *_ = server
    answer = client.post(route, content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (status, key), error
        assert text in error["message"]
        assert len(answer.content) < 2000
        assert not {"Traceback", "pydantic"} & {*error["message"].split()}
    assert good(client)


@pytest.mark.parametrize("route, key", ((G, "text"), (G, "input_ids"), (C, "prompt")))
def test_text_without_a_tokenizer_is_refused(route, key):
    prompts = bodies.Prompts(None, 512, (), 4096, ("fake",))
    with pytest.raises(server_.Refused, match=f"{key} is text, and there is no tokenizer") as refused:
        prompts.asked(bodies.Generate if route == G else bodies.Completions, {key: ["a"]})
    assert refused.value.key == key


def test_every_key_is_documented():
    text = (PROJECT / "docs" / "serve.md").read_text()
    kinds = [*vars(bodies).values()]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, bodies.Body)]
    keys = {key for kind in kinds for key in bodies.names(kind)} | {*bodies.IDLE} | bodies.UNREAD
    assert len(keys) > 75
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
    assert sorted(route for route in (*server_.POST, *server_.GET) if f"{route}`" not in text) == []


def test_a_stream_that_nobody_reads_holds_up_nobody(server):
    client, _, http = server
    asked = raw(input_ids=[5], stream=True, return_logprob=True, sampling_params={"max_new_tokens": 3000})
    streams = [connected(http) for _ in range(8)]
    for stream in streams:
        stream.sendall(asked)
    for _ in range(5):
        assert good(client)
    for stream in streams:
        stream.close()
    until(lambda: not http.backend.open)


def test_a_server_ends_in_spite_of_a_stream_that_nobody_reads(caplog, monkeypatch):
    """Without a word of its own about that."""
    monkeypatch.setattr(server_, "LAST_SECONDS", 1)
    with served() as (_, rank, http):
        params = {"max_new_tokens": 3000, "n": 60}
        with connected(http) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stream.sendall(raw(input_ids=[5], stream=True, return_logprob=True, sampling_params=params))
            until(lambda: rank.samples)
            http.drain()
            until(lambda: not http._thread.is_alive())
    assert [each for each in caplog.records if each.name.startswith("uvicorn")] == []


def raw(**keys) -> bytes:
    """A request to complete, as it travels."""
    body = json.dumps(keys).encode()
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def connected(http) -> socket.socket:
    host, port = http.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(server):
    """By its announced length, and by what has come where it announces none."""
    client, _, http = server
    with connected(http) as stream:
        stream.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n{")
        assert stream.recv(100).startswith(b"HTTP/1.1 413")
    sent = 0

    def endless():
        nonlocal sent
        for _ in range(1024):
            sent += MIB
            yield b" " * MIB

    with suppress(httpx.TransportError):  # the server closes the connection while the client writes
        assert client.post("/generate", content=endless()).status_code == 413
    assert sent < 64 * MIB
    assert good(client)


def test_half_a_body_and_a_silent_client_hold_up_nobody(server):
    client, _, http = server
    waiting = [connected(http) for _ in range(300)]
    for number, stream in enumerate(waiting):
        if number % 3 == 1:
            stream.sendall(b"POST /gen")
        if number % 3 == 2:
            stream.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"input_ids"')
    assert good(client)
    for stream in waiting:
        stream.close()
    assert good(client)


def test_a_slow_body_is_refused(server, monkeypatch):
    client, _, http = server
    monkeypatch.setattr(server_, "BODY_SECONDS", 0.1)
    with connected(http) as stream:
        stream.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert stream.recv(100).startswith(b"HTTP/1.1 408")
    assert good(client)


@pytest.mark.parametrize("stream", (False, True))
def test_a_client_that_leaves_frees_its_requests(server, stream):
    client, rank, http = server
    with connected(http) as sock:
        sock.sendall(raw(input_ids=[SLOW], stream=stream, sampling_params={"max_new_tokens": 4000}))
        until(lambda: rank.samples)
        if stream:
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
    until(lambda: not rank.samples and not http.backend.open)
    assert good(client)


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
