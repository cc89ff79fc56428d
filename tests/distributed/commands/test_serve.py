# SPDX-License-Identifier: Apache-2.0
"""`tpi serve`: the answers to 64 clients at random times are a file of `tpi generate`, in any layout."""

import hashlib
import json
import os
import random
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import hf_folders
from tests.distributed.commands.test_score import FOLDERS, write

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.usefixtures("modelopt")

CLIENTS, REQUESTS = 64, 80
LENGTHS = (1, 3, 17, 40, 70)
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "n": 2}


def requests():
    """Prompts that begin alike; greedy, drawn, and drawn from some."""
    draw = random.Random(3)
    start = [draw.randrange(512) for _ in range(64)]
    rows = []
    for n in range(REQUESTS):
        tokens = [*(start if n % 4 == 0 else ()), *(draw.randrange(512) for _ in range(draw.choice(LENGTHS)))]
        more = {0: {"temperature": 0}, 1: {"temperature": 1, "seed": n}, 2: SAMPLED | {"seed": 5}}[n % 3]
        rows.append({"id": f"r{n}", "tokens": tokens, "max_tokens": 2 + n % 7} | more)
    return rows


def line(row):
    """As tpi generate takes it."""
    if row["temperature"] == 0:
        return {key: value for key, value in row.items() if key != "temperature"}
    return {"do_sample": True, "top_k": 0} | row


def body(row, **more):
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    params = {names.get(key, key): value for key, value in row.items() if key not in ("id", "tokens")}
    return {
        "rid": row["id"],
        "input_ids": row["tokens"],
        "sampling_params": params | (more if row["temperature"] else {}),
    }


@pytest.fixture(scope="module")
def folder(shared):
    for name in ("qwen3", "moe"):
        model, dtype, overrides = FOLDERS[name]
        hf_folders.make(shared.folder / name, hf_folders.model_section(model, *overrides), dtype=dtype)
    model, dtype, overrides = FOLDERS["qwen3"]
    hf_folders.make(shared.folder / "next", hf_folders.model_section(model, *overrides), dtype=dtype, seed=1)
    deeper = hf_folders.model_section(model, *overrides, "model.num_layers=3")
    hf_folders.make(shared.folder / "deeper", deeper, dtype=dtype)
    write(shared.folder / "r.jsonl", map(line, requests()))
    write(shared.folder / "s.jsonl", [{"id": row["id"], "tokens": [*row["tokens"], 7, 8]} for row in requests()])
    return shared.folder


class Server:
    def __init__(self, shared, *words) -> None:
        self.process = shared.start("serve", *words, "--port", "0", "--logs", f"logs-{shared.count}")
        self.process.until(lambda: self.process.err.exists() and ": ready" in self.process.stderr)
        self.url = re.search(r"(http://\S+): ready", self.process.stderr)[1]

    def post(self, route, body):
        return httpx.post(f"{self.url}{route}", json=body, timeout=300, trust_env=False)

    def end(self, number=signal.SIGTERM):
        os.kill(self.process.pid, number)
        return self.process.wait()


def hashed(rows) -> str:
    """SHA-256 of ids, samples, tokens, bits and finish reasons."""
    return hashlib.sha256("\n".join(sorted(map(json.dumps, rows))).encode()).hexdigest()


def of_file(file: Path) -> str:
    rows = map(json.loads, file.read_text().splitlines())
    return hashed([[r["request"], r["sample"], r["token_ids"], r["bits"], r["finish_reason"]] for r in rows])


def of_server(server, **more) -> str:
    """Of the answers to CLIENTS clients, each at a random time; some leave and ask again, some score meanwhile."""
    order = random.Random(4)

    def ask(row, wait):
        time.sleep(wait)
        answer = server.post("/generate", body(row, **more) | {"return_logprob": True, "bits": True})
        assert answer.status_code == 200, answer.text
        answers = answer.json()
        return answers if isinstance(answers, list) else [answers]

    rows = requests()
    order.shuffle(rows)
    with ThreadPoolExecutor(CLIENTS) as pool:
        waits = [order.random() * 2 for _ in rows]
        answered = [one for several in pool.map(ask, rows, waits) for one in several]
    metas = [(one["meta_info"], one["output_ids"]) for one in answered]
    return hashed([[m["id"], m["sample"], ids, m["output_token_bits"], m["finish_reason"]["type"]] for m, ids in metas])


LAYOUTS = (
    ("qwen3", "--batch 16"), ("qwen3", "tp=2 --batch 7 --chunk 50 --cache 512"), ("qwen3", "dp=2"),
    ("moe", "tp=2 ep=2"), ("moe", "dp=2 ep=2"),
)  # fmt: skip


@pytest.mark.parametrize(
    "model, words", (LAYOUTS[0], *(pytest.param(*layout, marks=pytest.mark.release) for layout in LAYOUTS[1:]))
)
def test_answers_are_the_file_of_generate_and_of_score(shared, folder, model, words):
    """The control is another seed."""
    server = Server(shared, model, *words.split())
    assert of_server(server) == of_file(once(shared, "generate", model, "r.jsonl"))
    assert of_server(server, sampling_seed=99) != of_file(once(shared, "generate", model, "r.jsonl"))
    rows = [json.loads(text) for text in (folder / "s.jsonl").read_text().splitlines()]
    lines = once(shared, "score", model, "s.jsonl", "numerics=portable").read_bytes().splitlines()
    assert server.post("/score", {"sequences": rows}).content.endswith(b'"scores": [' + b", ".join(lines) + b"]}")
    assert server.end() == 0


def once(shared, command, model, *words) -> Path:
    """The file that a command writes."""
    file = shared.folder / f"{model}.{command}"
    if not file.exists():
        shared(command, model, *words, "--out", file.name, status=0)
    return file


LONG = {"temperature": 0, "max_new_tokens": 400}


def versions(answer) -> list[tuple[str, int]]:
    return [(run["weight_version"], run["tokens"]) for run in answer["meta_info"]["weight_versions"]]


@pytest.mark.parametrize("words", ("", pytest.param("tp=2", marks=pytest.mark.release)))
def test_tokens_have_the_bits_of_the_weights_that_they_name(shared, folder, words):
    """A completion that continues with other weights: each part is what these weights score."""
    server = Server(shared, "qwen3", *words.split())
    first = httpx.get(f"{server.url}/get_model_info", trust_env=False).json()["weight_version"]
    prompt = [*range(5, 75)]  # more than a block, whose keys a second request finds in the cache
    asked = {"input_ids": prompt, "sampling_params": LONG, "return_logprob": True}
    with httpx.stream("POST", f"{server.url}/generate", json=asked | {"stream": True}, timeout=300) as stream:
        parts = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        count = len(next(parts)["output_ids"])
        assert server.post("/pause_generation", {"mode": "retract"}).status_code == 200
        for source, why in (("deeper", "num_layers=3"), ("nowhere", "no such folder"), (torn(folder), "damaged")):
            refused = server.post("/update_weights_from_disk", {"model_path": str(folder / source)})
            assert (refused.status_code, why in refused.text) == (400, True), refused.text
        updated = server.post("/update_weights_from_disk", {"model_path": str(folder / "next")})
        assert updated.status_code == 200, updated.text
        second = updated.json()["weight_version"]
        server.post("/continue_generation", {})
        answer = [*parts][-1]
    assert [version for version, _ in versions(answer)] == [first, second]
    before = versions(answer)[0][1]
    assert count <= before < 400
    tokens, found = answer["output_ids"], [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    row = {"prompt_token_ids": prompt, "token_ids": tokens}
    new = server.post("/score", row).json()
    assert new["weight_version"] == second
    assert found[before:] == new["scores"][0]["logprobs"][before:]
    assert (
        server.post("/update_weights_from_disk", {"model_path": str(folder / "qwen3")}).json()["weight_version"]
        == first
    )
    old = server.post("/score", row).json()["scores"][0]["logprobs"]
    assert found[:before] == old[:before]
    assert found[before:] != old[before:]
    again = server.post("/generate", asked | {"sampling_params": LONG | {"max_new_tokens": before}}).json()
    assert [value for value, *_ in again["meta_info"]["output_token_logprobs"]] == found[:before]
    assert server.end() == 0


def opened(server, count: int) -> None:
    """Wait until so many completions are open."""
    asked = f"{server.url}/get_server_info"
    server.process.until(lambda: httpx.get(asked, trust_env=False).json()["open_completions"] == count)


def torn(folder: Path) -> Path:
    """A folder whose writing a full disk has stopped."""
    copy = folder / "torn"
    if not copy.exists():
        copy.mkdir()
        (copy / "config.json").write_bytes((folder / "next" / "config.json").read_bytes())
        data = (folder / "next" / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    return copy


@pytest.mark.parametrize("words", ("", pytest.param("dp=2", marks=pytest.mark.release)))
def test_a_killed_rank_ends_the_server_within_ten_seconds(shared, folder, words):
    server = Server(shared, "qwen3", *words.split())
    with ThreadPoolExecutor(4) as pool:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 20_000}}
        posts = [pool.submit(server.post, "/generate", body) for _ in range(4)]
        opened(server, 4)
        begun = time.monotonic()
        os.kill(max(children(server.process.pid)), signal.SIGKILL)
        assert server.process.wait() == 2
        assert time.monotonic() - begun < 10
        answers = [each.result() for each in posts]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert all("was killed by SIGKILL" in answer.text for answer in answers)
    assert "was killed by SIGKILL" in server.process.stderr
    assert "Traceback" not in server.process.stderr


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def test_sigterm_of_the_whole_group_answers_what_is_open(shared, folder):
    """As a service manager sends it: to the launcher and to all ranks."""
    server = Server(shared, "qwen3")
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(server.post, "/generate", {"input_ids": [5, 6, 7], "sampling_params": LONG})
        opened(server, 1)
        for rank in children(server.process.pid):
            os.kill(rank, signal.SIGTERM)
        assert server.end() == 0
        assert len(post.result().json()["output_ids"]) == 400


@pytest.mark.release
def test_a_second_signal_ends_the_server_at_once(shared, folder):
    server = Server(shared, "qwen3")
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 60_000}}
        post = pool.submit(server.post, "/generate", body)
        opened(server, 1)
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.until(lambda: "a second signal ends it now" in server.process.stderr)
        assert server.end() == 130
        assert post.result().status_code == 503
    starting = shared.start("serve", "qwen3", "--port", "0")
    starting.until(lambda: children(starting.pid))
    os.kill(starting.pid, signal.SIGTERM)
    assert starting.wait() == 130


REFUSED = (
    ((), "--host and --port name others"),
    (("--host", "256.1.1.1"), "cannot listen on 256.1.1.1"),
    (("--api-key-file", "nokey"), "--api-key-file nokey"),
    (("pp=2",), "pp=1"),
    (("max_tokens=3",), "max_tokens=3: tpi serve trains nothing and does not read it; leave it out"),
    (("--tokenizer", "nowhere"), "nowhere"),
)


@pytest.mark.parametrize("words, why", REFUSED)
def test_mistakes_are_one_message(shared, folder, words, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if not words else 0
        done = shared("serve", "qwen3", *words, "--port", port, status=2)
    assert why in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
