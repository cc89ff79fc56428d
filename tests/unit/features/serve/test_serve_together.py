# SPDX-License-Identifier: Apache-2.0
"""Requests that meet: streams, pauses, updates, scores, aborts and the end of the server, in unplanned orders."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from tests.unit.features.serve.fake_ranks import SLOW, served
from tests.unit.features.serve.test_serve_bodies import connected, good, raw, until
from tests.unit.features.serve.test_serve_routes import ask, events, slow, versions
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.features.serve import http as server_
from tp_invariant_recipes.features.serve import workflow

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")


def post(client, results, route, **body):
    """Ask in a thread."""
    thread = threading.Thread(target=lambda: results.append(client.post(route, json=body)))
    thread.start()
    return thread


# Text of a prompt, its stop strings, and the text of its answer: token n is the prompt's first byte plus n.
STOPS = (("A", ["CDE"], "AB"), ("A", ["BCDX", "DEF"], "ABC"), ("A", ["XYZ"], "ABCDEFGHIJKL"))


@pytest.mark.parametrize("text, stop, whole", STOPS)
def test_a_stream_never_sends_a_part_of_a_stop_string(text, stop, whole):
    with served() as (client, rank, _):
        rank.paced = True
        body = {"prompt": text, "max_tokens": 12, "stop": stop, "n": 2, "seed": 1}
        answer = ask(client, "/v1/completions", **body)
        parts = [part["choices"][0] for part in events(client, "/v1/completions", **body)]
        for index, choice in enumerate(answer["choices"]):
            assert "".join(part["text"] for part in parts if part["index"] == index) == choice["text"]
        assert answer["choices"][0]["text"] == whole
        params = {"max_new_tokens": 12, "stop": stop}
        texts = [part["text"] for part in events(client, "/generate", text=text, sampling_params=params)]
        assert texts[-1] == whole
        assert all(whole.startswith(each) for each in texts)


def special(tokens, skip_special_tokens=False):
    """A tokenizer whose token 67, C, is special."""
    return "".join({67: "" if skip_special_tokens else "<end>"}.get(token, chr(token)) for token in tokens)


# Stop string, most tokens, text of the answer, and why it has ended.
SPECIAL = (
    ("<end>", 9, "AB", {"type": "stop", "matched": "<end>"}),
    ("BD", 5, "ABDE", {"type": "length", "length": 5}),
)


@pytest.mark.parametrize("stop, most, text, finish", SPECIAL)
def test_stop_strings_are_searched_in_the_text_with_special_tokens(stop, most, text, finish):
    """As the engine does; the text of the answer lacks them."""
    codec = sequences.tokenizer("byte")._replace(decode=special, loaded=SimpleNamespace(decode=special))
    with served(codec) as (client, *_):
        params = {"max_new_tokens": most, "stop": stop}
        answer = ask(client, input_ids=[65], sampling_params=params)
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, finish)


def test_a_probe_of_a_paused_server_is_answered():
    with served() as (client, *_):
        ask(client, "/pause_generation", mode="in_place")
        assert client.get("/health").status_code == 200
        assert client.get("/health_generate", timeout=5).status_code == 503
        ask(client, "/continue_generation")
        assert client.get("/health_generate").status_code == 200


@pytest.mark.parametrize("mode", ("abort", "retract", "in_place"))
def test_a_paused_server_ends(mode):
    results = []
    with served() as (client, rank, http):
        before = slow(client, results, tokens=4000)
        until(lambda: rank.samples)
        ask(client, "/pause_generation", mode=mode)
        after = [slow(client, results, tokens=5), slow(client, results, tokens=5, stream=True)]
        until(lambda: len(http.backend.open) == (2 if mode == "abort" else 3))
        http.drain()
        for thread in (before, *after):
            thread.join(10)
        assert len(results) == 3
        assert all('"abort"' in answer.text for answer in results)
        until(http.backend.drained.is_set)


@pytest.mark.parametrize(
    "route, body", (("/score", {"tokens": [5, 6]}), ("/update_weights_from_disk", {"model_path": "v1"}))
)
def test_a_server_that_ends_answers_scores_and_updates(monkeypatch, route, body):
    """Also an update that waits for open requests, and the requests that wait for it."""
    monkeypatch.setattr(server_, "LAST_SECONDS", 1)
    results = []
    with served() as (client, rank, http):
        rank.delay = 1.5  # longer than clients have to read at the end
        update = route != "/score"
        first = slow(client, results, tokens=30) if update else None
        until(lambda: rank.samples or not update)
        asked = post(client, results, route, **body)
        until(lambda: http.backend.delayed is not None if update else rank.log)
        waiting = slow(client, results, tokens=2) if update else None
        until(lambda: len(http.backend.open) == 2 or not update)
        http.drain()
        for thread in filter(None, (first, asked, waiting)):
            thread.join(20)
        assert [answer.status_code for answer in results] == ([200] * 3 if update else [200])
        if update:
            assert [versions(results[n].json()) for n in (0, 2)] == [[("v0", 30)], [("v1", 2)]]


def test_an_update_that_waits_learns_that_a_rank_has_died():
    results = []
    with served() as (client, rank, http):
        threads = [slow(client, results, tokens=4000)]
        until(lambda: rank.samples)
        threads.append(post(client, results, "/update_weights_from_disk", model_path="v1"))
        until(lambda: http.backend.delayed is not None)
        http.end("the server ends: rank 0 was killed by SIGKILL")
        for thread in threads:
            thread.join(10)
        assert [(answer.status_code, "SIGKILL" in answer.text) for answer in results] == [(503, True)] * 2


def test_updates_of_a_paused_server_one_after_the_other():
    results = []
    with served() as (client, rank, _):
        thread = slow(client, results, tokens=30)
        until(lambda: any(len(drawn) > 3 for _, drawn, _ in rank.samples.values()))
        ask(client, "/pause_generation", mode="retract")
        for source in ("v1", "v2"):
            ask(client, "/update_weights_from_disk", model_path=source)
        assert ask(client, "/score", tokens=[5, 6])["weight_version"] == "v2"
        ask(client, "/continue_generation")
        thread.join()
        assert [version for version, _ in versions(results[0].json())] == ["v0", "v2"]
        assert sum(count for _, count in versions(results[0].json())) == 30


def test_one_of_a_list_is_aborted():
    results = []
    with served() as (client, rank, _):
        thread = slow(client, results, tokens=200, input_ids=[[SLOW], [SLOW]], rid=["a", "b"])
        until(lambda: len(rank.samples) == 2)
        ask(client, "/abort_request", rid="a")
        thread.join()
        reasons = [one["meta_info"]["finish_reason"]["type"] for one in results[0].json()]
        assert reasons == ["abort", "length"]
        thread = slow(client, results, tokens=4000, input_ids=[[SLOW], [SLOW]], rid="a")  # their ids are a_0 and a_1
        until(lambda: len(rank.samples) == 2)
        ask(client, "/abort_request", rid="a")
        thread.join(5)
        assert [one["meta_info"]["finish_reason"]["type"] for one in results[-1].json()] == ["abort", "abort"]


def test_a_client_that_leaves_before_its_requests_begin():
    """They wait for other weights."""
    results = []
    with served() as (client, rank, http):
        first = slow(client, results, tokens=50)
        until(lambda: rank.samples)
        update = post(client, results, "/update_weights_from_disk", model_path="v1")
        until(lambda: http.backend.delayed is not None)
        with connected(http) as stream:
            stream.sendall(raw(input_ids=[5], sampling_params={"n": 3}))
            until(lambda: http.backend.delayed)
        until(lambda: http.backend.delayed == {})
        first.join()
        update.join()
        assert len([one for one in rank.log if hasattr(one, "draws")]) == 1
        assert good(client)


def test_requests_of_one_connection_are_answered_in_order():
    """HTTP pipelining."""
    with served() as (client, _, http):
        with connected(http) as stream:
            asked = (raw(input_ids=[n], sampling_params={"max_new_tokens": 1}) for n in (SLOW, 7, 8))
            stream.sendall(b"".join(asked))
            stream.settimeout(10)
            found = b""
            while found.count(b"output_ids") < 3:
                found += stream.recv(1 << 16)
        order = [found.index(b'"output_ids":[%d]' % n) for n in (SLOW, 7, 8)]
        assert order == sorted(order)
        assert good(client)


def test_the_launcher_keeps_no_end_of_the_ranks(monkeypatch):
    """Otherwise half a message of a killed rank holds up all answers."""
    mine, theirs = Pipe()
    monkeypatch.setattr(workflow.local, "run", lambda plan, tick, **_: [tick(), tick()])
    http = SimpleNamespace(start=int, end=str, url="", backend=SimpleNamespace(state="starting"))
    workflow._until_the_end(http, None, None, None, [theirs])
    with pytest.raises(EOFError):
        mine.recv()
