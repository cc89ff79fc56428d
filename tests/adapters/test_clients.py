# SPDX-License-Identifier: Apache-2.0
"""Other people's clients against `tpi serve`, on a CPU: `scripts/try-clients`. Each gets the tokens and bits of a file
of `tpi generate`.
"""

import json
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest

from tests.adapters import verl_toy
from tests.adapters.serving import TPI, served

pytestmark = pytest.mark.release
PROMPT, NEW = [5, 6, 7], 12
REQUEST = {"id": "q1", "tokens": PROMPT, "max_tokens": NEW, "do_sample": True, "top_k": 0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    verl_toy.make_folder(folder / "model", chat=True)
    (folder / "r.jsonl").write_text(json.dumps(REQUEST))
    subprocess.run([*TPI, "generate", "model", "r.jsonl", "device=cpu", "--out", "o.jsonl"], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return json.loads((folder / "o.jsonl").read_text())


@pytest.fixture(scope="module")
def url(folder):
    pytest.importorskip("uvicorn")
    with served(folder / "model", log=folder / "serve.log") as url:
        yield url


def shown(client, answer):
    """A line of a transcript."""
    print(f"\n{client}: {json.dumps(answer)[:400]}")


def curl(url, **more):
    body = {"input_ids": PROMPT, "rid": "q1", "return_logprob": True} | more
    body["sampling_params"] = {"max_new_tokens": NEW, "sampling_seed": 3}
    headers = ["-H", "Content-Type: application/json"]
    command = ["curl", "-sS", f"{url}/generate", *headers, "-d", json.dumps(body)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_curl(url, expected):
    answer = curl(url, bits=True)
    shown("curl", answer)
    assert answer["output_ids"] == expected["token_ids"]
    assert answer["meta_info"]["output_token_bits"] == expected["bits"]


def test_openai(url, expected):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    (model,) = client.models.list().data
    asked = {"model": model.id, "max_tokens": NEW, "temperature": 1.0, "seed": 3}
    more = {"rid": "q1", "return_token_ids": True}
    (choice,) = client.completions.create(prompt=PROMPT, logprobs=0, extra_body=more, **asked).choices
    shown("openai completions", choice.to_dict())
    assert choice.token_ids == expected["token_ids"]
    assert choice.logprobs.token_logprobs == expected["logprobs"]
    parts = client.completions.create(prompt=PROMPT, stream=True, extra_body=more, **asked)
    assert "".join(part.choices[0].text for part in parts if part.choices) == choice.text
    chat = {"messages": [{"role": "user", "content": "t5 t6 t7"}], "logprobs": True, "extra_body": {"rid": "q1"}}
    (choice,) = client.chat.completions.create(**chat, **asked).choices
    shown("openai chat", choice.to_dict())
    assert [each.logprob for each in choice.logprobs.content] == expected["logprobs"]
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(prompt=PROMPT, logit_bias={"5": 1}, **asked)


def test_torchrl(url, expected):
    sglang = pytest.importorskip("torchrl.modules.llm.backends.sglang.sglang_server")
    service = sglang.AsyncSGLang.connect(url)
    answer = service.generate(input_ids=PROMPT, return_logprobs=True, max_new_tokens=NEW, temperature=0.0)
    shown("torchrl AsyncSGLang", answer)
    greedy = service.generate(input_ids=[PROMPT, PROMPT[:2]], return_logprobs=True, max_new_tokens=4, temperature=0.0)
    assert greedy[0]["output_ids"] == answer["output_ids"][:4]
    assert len(answer["meta_info"]["output_token_logprobs"]) == NEW
    drawn = service.generate(input_ids=PROMPT, return_logprobs=True, max_new_tokens=NEW, temperature=1.0)
    assert len(drawn["output_ids"]) <= NEW
    (text,) = service.generate(["t5 t6 t7"], max_new_tokens=4, temperature=0.0)
    assert text["output_ids"] == answer["output_ids"][:4]


@contextmanager
def routed(url, port="30199"):
    command = ["sglang-router", "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", url]
    process = subprocess.Popen(command)
    try:
        for _ in range(150):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_sglangs_router(url, expected):
    pytest.importorskip("sglang_router")
    with routed(url) as router:
        answer = curl(router)
    shown("sglang-router", answer)
    assert answer["output_ids"] == expected["token_ids"]
    assert [value for value, *_ in answer["meta_info"]["output_token_logprobs"]] == expected["logprobs"]
