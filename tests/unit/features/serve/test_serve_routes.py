# SPDX-License-Identifier: Apache-2.0
"""What the routes answer, how weights change under open requests, and how a server ends."""

import json
import re
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.features.serve.fake_ranks import SLOW, served
from tests.unit.features.serve.test_serve_bodies import until
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.features.rollouts.schedule import SampleState
from tp_invariant_recipes.features.serve import answers, backend
from tp_invariant_recipes.features.serve import messages as messages_

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def server():
    with served(queue=64) as parts:
        yield parts


def ask(client, route="/generate", **body):
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client, route, **body):
    with client.stream("POST", route, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_of_sglang(server):
    client, *_ = server
    params = {"max_new_tokens": 3, "temperature": 0}
    answer = ask(
        client, input_ids=[65, 66], sampling_params=params, return_logprob=True, logprob_start_len=0, bits=True,
    )  # fmt: skip
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("ABC", [65, 66, 67])
    assert meta["output_token_logprobs"] == [[-0.125, 65, None], [-0.25, 66, None], [-0.375, 67, None]]
    assert meta["output_token_bits"] == ["be000000", "be800000", "bec00000"]
    assert meta["input_token_logprobs"] == [[None, 65, None], [-0.5, 66, None]]
    assert meta["input_token_bits"] == [None, "bf000000"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["id"]) == (2, 3, "1")
    assert meta["weight_version"] == meta["input_weight_version"] == "v0"
    assert meta["weight_versions"] == [{"weight_version": "v0", "tokens": 3}]


@pytest.mark.parametrize(
    "body, ids",
    (
        ({"input_ids": [5], "rid": "a"}, ["a"]),
        ({"input_ids": [[5], [5]], "rid": "a"}, ["a_0", "a_1"]),
        ({"input_ids": [[5], [5]], "rid": ["x", "y"]}, ["x", "y"]),
        ({"input_ids": [[5], [5]], "sampling_params": {"sampling_seed": 3}}, ["1", "2"]),
        ({"input_ids": [5], "sampling_params": {"temperature": 0}}, ["1"]),
        ({"input_ids": [5], "sampling_params": {"n": 2}, "rid": "a"}, ["a", "a"]),
        ({"text": ["x"], "rid": "a"}, ["a"]),
    ),
)
def test_draws_have_the_ids_of_their_request(server, body, ids):
    client, rank, _ = server
    rank.log.clear()
    answer = ask(client, **body)
    several = answer if isinstance(answer, list) else [answer]
    assert [one["meta_info"]["id"] for one in several] == ids
    assert [join.draws for join in rank.log if isinstance(join, messages_.Join)] == [*dict.fromkeys(ids)]


def test_each_prompt_of_a_list_has_its_scores(server):
    """From a token on that the second one does not have."""
    client, *_ = server
    answers = ask(client, input_ids=[[5, 6, 7], [8], [9, 8, 7, 6]], return_logprob=True, logprob_start_len=2)
    found = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert found == [[[-0.5, 7, None]], [], [[-0.5, 7, None], [-0.5, 6, None]]]


def test_requests_without_id_and_seed_get_new_ids(server):
    client, *_ = server
    first, second = (ask(client, input_ids=[[5], [5]]) for _ in range(2))
    assert len({one["meta_info"]["id"] for one in [*first, *second]}) == 4


@pytest.mark.parametrize(
    "params, text, matched",
    (
        ({"stop": "C"}, "AB", "C"),
        ({"stop": ["x", "CD"], "no_stop_trim": True}, "ABCD", "CD"),
        ({"stop_token_ids": [67]}, "ABC", 67),
        ({"stop_token_ids": [67], "stop": ["B"]}, "A", "B"),
    ),
)
def test_stops_end_a_text_and_are_named(server, params, text, matched):
    client, *_ = server
    answer = ask(client, text="A", sampling_params=params | {"max_new_tokens": 9})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": matched})


def test_a_stream_of_sglang_grows_to_the_whole_answer(server):
    client, *_ = server
    body = {"input_ids": [65], "rid": "a", "return_logprob": True, "sampling_params": {"max_new_tokens": 40}}
    parts, whole = events(client, "/generate", **body), ask(client, **body)
    assert parts[-1] == whole
    assert [len(part["output_ids"]) for part in parts] == sorted({len(part["output_ids"]) for part in parts})
    several = events(client, "/generate", input_ids=[[65], [66]], sampling_params={"max_new_tokens": 3, "n": 2})
    last = {part["index"]: part["text"] for part in several}
    assert last == {0: "ABC", 1: "BCD", 2: "BCD", 3: "CDE"}


def test_completions_of_openai(server):
    client, *_ = server
    keys = {"logprobs": 0, "return_token_ids": True, "bits": True, "max_tokens": 2, "rid": "a", "model": "fake"}
    answer = ask(client, "/v1/completions", prompt=[[65, 66], [70]], **keys)
    first, second = answer["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "AB", "length")
    assert (first["token_ids"], first["prompt_token_ids"], second["text"]) == ([65, 66], [65, 66], "FG")
    assert first["logprobs"] == {
        "tokens": ["A", "B"], "token_logprobs": [-0.125, -0.25], "top_logprobs": None, "text_offset": [0, 1],
        "bits": ["be000000", "be800000"],
    }  # fmt: skip
    named = ask(client, "/v1/completions", prompt=[65], return_tokens_as_token_ids=True, **keys)
    assert named["choices"][0]["logprobs"]["tokens"] == [
        f"token_id:{token}" for token in named["choices"][0]["token_ids"]
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert (answer["object"], answer["model"], answer["weight_version"]) == ("text_completion", "fake", "v0")


@pytest.mark.parametrize("prompt", ("A", [0xE2]))  # 0xE2 begins a character of three bytes
def test_a_stream_of_openai_joins_to_the_whole_text(server, prompt):
    client, *_ = server
    body = {"prompt": prompt, "max_tokens": 30, "logprobs": 0, "return_token_ids": True, "seed": 1}
    parts = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    whole = ask(client, "/v1/completions", **body)
    choices = [part["choices"][0] for part in parts[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert parts[-1]["usage"] == whole["usage"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"


def test_scores_are_the_lines_of_tpi_score(server):
    client, *_ = server
    answer = ask(client, "/score", sequences=[{"tokens": [5, 6, 7]}, {"prompt": "ab", "response": "c"}])
    assert answer["scores"] == [
        {"token_ids": [6, 7], "logprobs": [-0.5, -0.5]}, {"token_ids": [99], "logprobs": [-0.5]},
    ]  # fmt: skip


@given(st.lists(st.floats(max_value=0, width=32, allow_infinity=False, allow_nan=False)))
def test_decimals_give_the_bits_back(values):
    found = json.loads(json.dumps(backend.decimals(values)))
    assert [f"{x:08x}" for x in np.array(found, np.float32).view(np.uint32)] == answers.hexadecimal(values)
    assert all(len(json.dumps(abs(x)).partition("e")[0].replace(".", "").strip("0")) <= 9 for x in found)


def test_ranks_tell_each_token_of_a_stream_and_parts_of_what_waits():
    rank = pytest.importorskip("tp_invariant_recipes.features.serve.rank")
    loop, told = object.__new__(rank.Loop), {"a": [], "b": []}
    send = lambda events: [told[each.key].append([*each.tokens]) for each in events]  # noqa: E731
    loop.tells, loop.version, loop.pipe = True, "v0", SimpleNamespace(send=send)
    states = [SampleState(Request(key, (5,), Sampling(max_new_tokens=70)), 0, 0) for key in "ab"]
    loop.open = {(s.request.id, 0): rank.Sample(s, part) for s, part in zip(states, (1, rank.PART), strict=True)}
    for token in range(70):
        for state in states:
            state.drawn.append(token)
            state.log_probabilities.append(-1.0)
        loop._tell([state.completion("length") for state in states] if token == 69 else ())
    assert told["a"] == [[token] for token in range(70)]
    assert told["b"] == [[*range(32)], [*range(32, 64)], [*range(64, 70)]]
    assert not loop.open


def slow(client, results, tokens=60, **body):
    """Ask for a completion that takes its time, in a thread."""

    def run():
        results.append(
            client.post("/generate", json={"input_ids": [SLOW], "sampling_params": {"max_new_tokens": tokens}} | body)
        )

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def versions(answer):
    return [(run["weight_version"], run["tokens"]) for run in answer["meta_info"]["weight_versions"]]


# What happens before an update, its body, the finish reason of an open request, and the versions of its tokens.
UPDATES = (
    (None, {}, "length", ["v0"]),
    (None, {"abort_all_requests": True}, "abort", ["v0"]),
    ("retract", {}, "length", ["v0", "v1"]),
    ("in_place", {}, "length", ["v0", "v1"]),
    ("abort", {}, "abort", ["v0"]),
)


@pytest.mark.parametrize("mode, body, reason, which", UPDATES)
def test_an_open_request_ends_as_asked_when_weights_change(mode, body, reason, which):
    results = []
    with served() as (client, rank, _):
        thread = slow(client, results)
        until(lambda: any(len(drawn) > 3 for _, drawn, _ in rank.samples.values()))
        if mode:
            ask(client, "/pause_generation", mode=mode)
        updated = ask(client, "/update_weights_from_disk", model_path="v1", **body)
        if mode:
            ask(client, "/continue_generation")
        thread.join()
        assert (updated["success"], updated["weight_version"]) == (True, "v1")
        answer = results[0].json()
        assert answer["meta_info"]["finish_reason"]["type"] == reason
        assert [version for version, _ in versions(answer)] == which
        assert sum(count for _, count in versions(answer)) == len(answer["output_ids"]) > 0
        assert ask(client, input_ids=[5])["meta_info"]["weight_version"] == "v1"


def test_new_requests_wait_for_weights_that_are_being_loaded():
    results = []
    with served() as (client, rank, http):
        first = slow(client, results, tokens=30)
        until(lambda: rank.samples)
        update = threading.Thread(target=ask, args=(client, "/update_weights_from_disk"), kwargs={"model_path": "v1"})
        update.start()
        until(lambda: http.backend.delayed is not None)
        second = client.post("/update_weights_from_disk", json={"model_path": "v2"})
        assert (second.status_code, second.json()["error"]["code"]) == (409, 409)
        assert ask(client, input_ids=[5])["meta_info"]["weight_version"] == "v1"
        for thread in (first, update):
            thread.join()
        assert versions(results[0].json()) == [("v0", 30)]


def test_a_refused_update_changes_nothing():
    results = []
    with served() as (client, rank, _):
        thread = slow(client, results, tokens=40)
        until(lambda: rank.samples)
        for source in ("wide", "nan"):
            assert client.post("/update_weights_from_disk", json={"model_path": source}).status_code == 400
        thread.join()
        assert versions(results[0].json()) == [("v0", 40)]
        assert ask(client, input_ids=[5])["meta_info"]["weight_version"] == "v0"


def test_requests_are_aborted_by_id_and_all():
    results = []
    with served() as (client, rank, _):
        threads = [slow(client, results, tokens=4000, rid=name) for name in ("a", "b", "b")]
        until(lambda: len(rank.samples) == 3)
        ask(client, "/abort_request", rid="b")
        for thread in threads[1:]:
            thread.join()
        assert [len(results), len(rank.samples)] == [2, 1]
        assert client.post("/flush_cache").status_code == 400
        ask(client, "/abort_request", abort_all=True)
        threads[0].join()
        assert {answer.json()["meta_info"]["finish_reason"]["type"] for answer in results} == {"abort"}
        ask(client, "/flush_cache")


def test_a_full_queue_is_429():
    results = []
    with served(queue=2) as (client, rank, _):
        thread = slow(client, results, tokens=60)
        until(lambda: rank.samples)
        body = {"input_ids": [5], "sampling_params": {"n": 2}}
        refused = client.post("/generate", json=body)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        thread.join()
        assert client.post("/generate", json=body).status_code == 200


def test_a_server_that_ends_answers_what_is_open_first():
    results = []
    with served() as (client, rank, http):
        thread = slow(client, results, tokens=50)
        until(lambda: rank.samples)
        http.drain()
        until(lambda: http.backend.state == "draining")
        refused = client.post("/generate", json={"input_ids": [5]})
        assert (refused.status_code, client.get("/health").status_code) == (503, 503)
        thread.join()
        assert len(results[0].json()["output_ids"]) == 50
        until(lambda: rank.log[-1] == messages_.END)


def test_a_dead_rank_answers_each_open_request():
    results = []
    with served() as (client, rank, http):
        threads = [slow(client, results, tokens=4000, stream=stream) for stream in (False, False, True)]
        until(lambda: len(rank.samples) == 3)
        http.end("the server ends: rank 0 was killed by SIGKILL")
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in results) == [200, 503, 503]  # a stream has begun
        assert all("rank 0 was killed by SIGKILL" in answer.text for answer in results)


def test_a_key_is_asked_for():
    with served(key="k" * 20) as (client, *_):
        assert ask(client, input_ids=[5])
        for headers in (
            {},
            {"Authorization": "k" * 20},
            {"Authorization": "Bearer kk"},
            {"Authorization": b"Bearer \xe9"},
        ):
            with httpx.Client(base_url=client.base_url, headers=headers, trust_env=False) as other:
                assert other.post("/generate", json={"input_ids": [5]}).status_code == 401
                assert other.get("/v1/models").status_code == 401
                assert other.get("/health").status_code == 200


def test_metrics_count(server):
    client, *_ = server
    line = re.compile(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? \d+(\.\d+)?(e-\d+)?')
    before, after = ({}, {})
    for found in (before, after):
        text = client.get("/metrics").text
        assert [row for row in text.splitlines() if not line.fullmatch(row)] == []
        found |= {row.rsplit(" ", 1)[0]: float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row[0] != "#"}
        ask(client, input_ids=[5, 6], sampling_params={"max_new_tokens": 7})
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['tpi_requests_total{route="/generate",status="200"}'] == 1
    assert (grown["tpi_prompt_tokens_total"], grown["tpi_generation_tokens_total"]) == (2, 7)
    assert after['tpi_weights_info{weight_version="v0"}'] == 1
    assert after["tpi_open_completions"] == 0


def test_facts(server):
    client, *_ = server
    assert client.get("/get_model_info").json() == {"model_path": "fake", "weight_version": "v0"}
    assert client.get("/get_server_info").json()["cache_tokens"] == 4096
    assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert client.get("/health_generate").status_code == client.get("/health").status_code == 200


END = 3  # a byte that ends an answer


def template(messages, answer):
    return "".join(f"{m['role'][0]}{m['content']}{chr(END)}\n" for m in messages) + ("a" if answer else "")


def test_a_chat_goes_on_with_the_ids_that_were_sampled():
    """Not with those of their text; a message without ids is text."""
    codec = sequences.tokenizer("byte")._replace(template=template)
    first = [{"role": "user", "content": "hi"}]
    with served(codec, ends=(END,)) as (client, rank, _):
        answer = ask(client, "/v1/chat/completions", messages=first, max_tokens=2, return_token_ids=True, logprobs=True)
        message = answer["choices"][0]["message"]
        assert message["prompt_token_ids"] == answer["prompt_token_ids"] == [*b"uhi", END, *b"\na"]
        assert message["generation_token_ids"] == [117, 118]
        assert message["generation_log_probs"] == [-0.125, -0.25]
        assert answer["choices"][0]["logprobs"]["content"][1]["logprob"] == -0.25
        sampled = message | {"generation_token_ids": [300, END]}  # as if the text had other ids
        more = [*first, sampled, {"role": "user", "content": "x"}]
        for messages in (more, [*first, {"role": "assistant", "content": message["content"]}, more[-1]]):
            ask(client, "/v1/chat/completions", messages=messages, max_tokens=1)
        joined = [join.request.tokens for join in rank.log if isinstance(join, messages_.Join)][1:]
        ids, text = joined
        assert ids == (*b"uhi", END, *b"\na", 300, END, *b"\nux", END, *b"\na")
        assert text == (*b"uhi", END, *b"\na", *b"uv", END, *b"\nux", END, *b"\na")
        wrong = client.post("/v1/chat/completions", json={"messages": [*first, sampled | {"prompt_token_ids": "x"}]})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
