# SPDX-License-Identifier: Apache-2.0
"""Requests of rollouts: values of `Sampling`, JSONL in and out, and what is refused."""

import json
import os
import resource
import signal

import pytest

from tests import examples
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.features.rollouts import prompts, requests
from tp_invariant_recipes.features.rollouts.requests import Completion, Request, Sampling
from tp_invariant_recipes.features.score import engine_scores

DRAWS = Sampling(do_sample=True)


def test_defaults_are_those_of_transformers():
    from transformers import GenerationConfig

    expected = GenerationConfig()._get_default_generation_params()
    own = Sampling()
    for name in ("do_sample", "temperature", "top_k", "top_p", "num_return_sequences"):
        assert getattr(own, name) == expected[name], name
    assert own.max_new_tokens == expected["max_length"]  # which generate() takes for new tokens, if nobody sets it
    assert all(
        hasattr(GenerationConfig(), name) for name in prompts.NAMES if name not in ("seed", *prompts.SHORT_NAMES)
    )


WRONG = (
    ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number, at least 1"),
    ({"max_new_tokens": True}, "max_new_tokens=True"),
    ({"do_sample": True, "temperature": 0.0}, "do_sample=false takes the most probable token"),
    ({"do_sample": True, "temperature": float("nan")}, "temperature=nan"),
    ({"do_sample": True, "temperature": float("inf")}, "temperature=inf"),
    ({"do_sample": True, "temperature": 10**400}, "must be from 1e-6 to 1e6"),
    ({"do_sample": True, "top_p": float("nan")}, "top_p=nan"),
    ({"do_sample": True, "top_p": 0.0}, "top_p=0.0: must be above 0"),
    ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
    ({"do_sample": True, "top_k": -1}, "top_k=-1"),
    ({"do_sample": True, "seed": -1}, "seed=-1"),
    ({"do_sample": "yes"}, "do_sample='yes': must be true or false"),
    ({"eos_token_id": -1}, "eos_token_id=(-1,)"),
    ({"stop_strings": ""}, "stop_strings=('',)"),
    ({"temperature": 0.7}, "temperature=0.7: has no effect without draws; do_sample=true"),
    ({"num_return_sequences": 4}, "num_return_sequences=4: has no effect without draws"),
    ({"seed": 1}, "seed=1: has no effect without draws"),
)


@pytest.mark.parametrize("values, why", WRONG)
def test_values_without_meaning_are_refused(values, why):
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)
    assert why in str(caught.value)


def test_a_single_id_and_string_are_taken():
    values = {"eos_token_id": 3, "stop": "###", "n": 2, "temperature": 2, "max_tokens": 7}
    sampling = prompts.settled(values.items(), DRAWS)
    expected = {"eos_token_id": (3,), "stop_strings": ("###",), "num_return_sequences": 2, "max_new_tokens": 7}
    assert {name: getattr(sampling, name) for name in expected} == expected
    assert type(sampling.temperature) is float
    assert Sampling(eos_token_id=None).eos_token_id == ()


def test_completions_end():
    def decode(tokens):
        return bytes(tokens).decode(errors="replace")

    sampling = Sampling(max_new_tokens=9, eos_token_id=(7,), stop_strings=("END", "é"))

    def ended(text):
        return requests.finish_reason([*text.encode()], sampling, decode)

    assert ended("EN") is None
    assert ended("xEND") == "stop"
    assert ended("caf\u00e9") == "stop"
    assert ended("END x") is None  # it ended before, where it was looked at
    assert ended("abc\x07") == "stop"
    assert ended("abcdefghi") == "length"
    assert ended("abcdefEND") == "stop"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    examples.write(folder)
    return folder / "tokenizer"


@pytest.fixture(scope="module")
def talking(words, tmp_path_factory):
    """The same tokenizer with a chat template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("talking")
    tokenizer = AutoTokenizer.from_pretrained(str(words))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '= ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def read(folder, rows, tokenizer=None, sampling=DRAWS):
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return prompts.read(file, tokenizer and sequences.tokenizer(str(tokenizer)), sampling)


def test_a_huge_configuration_is_refused_unread(tmp_path):
    (tmp_path / "generation_config.json").touch()
    os.truncate(tmp_path / "generation_config.json", 1 << 40)
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        prompts.end_tokens(tmp_path, None, 100)


def test_prompts_are_text_ids_and_conversations(tmp_path, talking):
    rows = [
        {"prompt": "2 + 3 =", "metadata": {"answer": 5}},
        {"id": "x", "tokens": [1, 2]},
        {"id": 7, "prompt": [4], "n": 3, "top_k": 5},
        {"messages": [{"role": "user", "content": "2 + 3"}]},
    ]
    results = read(tmp_path, rows, talking)
    assert [request.id for request in results] == ["1", "x", "7", "4"]
    # <eos>, <unk>, +, =, 0, 1, …
    assert [request.tokens for request in results] == [(6, 2, 7, 3), (1, 2), (4,), (6, 2, 7, 0, 3)]
    assert results[2].sampling == Sampling(do_sample=True, num_return_sequences=3, top_k=5)
    assert results[0].sampling == DRAWS


REFUSED = (
    ("{", "line 1: not JSON"),
    ({"id": 1}, "a request has one of prompt, tokens, messages; its keys: id"),
    ({"prompt": "a", "tokens": [1]}, "a request has one of prompt, tokens, messages"),
    ({"prompt": "a"}, "prompt is text, and there is no tokenizer: --tokenizer FOLDER"),
    ({"tokens": "a"}, "tokens must be a list of token ids"),
    ({"tokens": [1.5]}, "tokens must be a list of token ids"),
    ({"tokens": [True]}, "tokens must be a list of token ids"),
    ({"messages": []}, "messages need a tokenizer"),
    ({"tokens": [1], "num_beams": 4}, "line 1: num_beams: no such key"),
    ({"tokens": [1], "temprature": 0.5}, "line 1: temprature: no such key; did you mean 'temperature'?"),
    ({"tokens": [1], "answer": 5}, "answer: no such key"),
    ({"tokens": [1], "answer": 5}, "tpi does not read what is in metadata"),
    ({"tokens": [1], "temperature": "hot"}, "line 1: temperature='hot'"),
    ({"tokens": [1], "n": 2, "num_return_sequences": 3}, "line 1: num_return_sequences is there twice"),
    ({"tokens": [1], "id": [2]}, "id must be text or a whole number"),
    ({"tokens": [1], "eos_token_id": 1.5}, "line 1: "),
)


@pytest.mark.parametrize("row, why", REFUSED)
def test_wrong_lines_are_named(tmp_path, row, why):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, [row, {"tokens": [1]}])
    assert why in str(caught.value)
    assert str(tmp_path / "prompts.jsonl") in str(caught.value)


def test_files_without_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no requests in it"):
        read(tmp_path, [])
    with pytest.raises(ConfigError, match="No such file"):
        prompts.read(tmp_path / "none", None, DRAWS)


def test_templates_that_refuse_are_named(tmp_path, talking, words):
    with pytest.raises(ConfigError, match="need a tokenizer with a chat template"):
        read(tmp_path, [{"messages": [{"content": "2"}]}], words)
    with pytest.raises(ConfigError, match="the chat template refuses them"):
        read(tmp_path, [{"messages": [{"content": 2}]}], talking)


UNFIT = (
    (Request("a", (), DRAWS), "request a: an empty prompt"),
    (Request("a", (5, 100), DRAWS), "request a: token 100 is outside the model's vocabulary of 100"),
    (Request("a", (-1,), DRAWS), "token -1 is outside"),
    (
        Request("a", (1,) * 20, DRAWS),
        "20 tokens and max_new_tokens=20 are more than the 32 that positions and cache have",
    ),
    (Request("a", (1,), Sampling(eos_token_id=(100,))), "eos_token_id 100 is outside"),
    (Request("a", (1,), Sampling(stop_strings=("x",))), "stop_strings need a tokenizer"),
    (Request("b", (1,), DRAWS), "request b: its id is there twice"),
)


@pytest.mark.parametrize("request_, why", UNFIT)
def test_requests_that_no_engine_can_complete_are_refused(request_, why):
    with pytest.raises(ConfigError) as caught:
        requests.check([Request("b", (1,), DRAWS), request_], 100, 32, text=False)
    assert why in str(caught.value)
    requests.check([Request("b", (1,), DRAWS)], 100, 32, text=False)


def completion(name="a", sample=0, tokens=(9, 2), digests=()):
    return Completion(name, sample, tokens, (-1.25, -0.5)[: len(tokens)], (2, 1)[: len(tokens)], "stop", digests)


def test_a_line_is_a_sequence_and_a_row_of_an_engine():
    line = prompts.line((5, 6), completion(digests=(-1, 3)), lambda ids: f"{ids}")
    assert json.loads(line) == {
        "id": "a[0]", "request": "a", "sample": 0, "prompt_token_ids": [5, 6], "token_ids": [9, 2],
        "logprobs": [-1.25, -0.5], "ranks": [2, 1], "bits": ["bfa00000", "bf000000"], "sum": -1.75,
        "finish_reason": "stop", "text": "[9, 2]", "digests": ["f" * 16, f"{3:016x}"],
    }  # fmt: skip
    assert sequences.parse(line, 1, 100, None) == [sequences.Sequence("a[0]", [5, 6, 9, 2], 2)]
    rollout = engine_scores.parse(line, 1)
    assert (rollout.id, rollout.tokens, rollout.logprobs) == ("a[0]", [9, 2], [-1.25, -0.5])
    assert "text" not in json.loads(prompts.line((5,), completion(), None))


def test_completions_come_in_order_from_the_files_of_ranks(tmp_path):
    rows = [{"id": "b", "tokens": [5], "n": 2}, {"id": "a", "tokens": [6]}, {"id": "c", "tokens": [7]}]
    asked = read(tmp_path, rows)
    first, second = (prompts.writer(tmp_path, rank, asked, None) for rank in (0, 1))
    second(completion("a"))
    first(completion("b", 1))
    first(completion("b", 0))
    where = prompts.places(tmp_path)
    assert where.keys() == {("a", 0), ("b", 0), ("b", 1)}
    (tmp_path / "part-1.jsonl").open("ab").write(b'{"id": "c[0]", "requ')  # cut by a kill
    assert prompts.places(tmp_path).keys() == where.keys()
    prompts.writer(tmp_path, 1, asked, None)(completion("c"))
    prompts.join(tmp_path / "whole", asked, prompts.places(tmp_path))
    whole = (tmp_path / "whole").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in whole] == ["b[0]", "b[1]", "a[0]", "c[0]"]
    (tmp_path / "part-1.jsonl").open("ab").write(b"{}\n")
    with pytest.raises(RunError, match="is damaged"):
        prompts.places(tmp_path)


def test_a_full_disk_is_one_message(tmp_path):
    """What was written before stays, and no part of a line beside it."""
    append = prompts.writer(tmp_path, 0, read(tmp_path, [{"id": "a", "tokens": [5], "n": 2}]), None)
    append(completion("a"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "part-0.jsonl").stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(RunError, match="cannot write"):
            append(completion("a", 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert prompts.places(tmp_path).keys() == {("a", 0)}
    assert (tmp_path / "part-0.jsonl").stat().st_size == size


ENDS = (
    ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 7}}, (5, 6)),
    ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, (7,)),
    ({"config.json": {"eos_token_id": None}}, (256,)),  # the tokenizer's
    ({}, (256,)),
)


@pytest.mark.parametrize("files, ids", ENDS)
def test_the_model_or_else_the_tokenizer_says_what_ends_a_text(tmp_path, files, ids):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert prompts.end_tokens(tmp_path, sequences.tokenizer("byte"), 512) == ids
    assert prompts.end_tokens(None, sequences.tokenizer("byte"), 512) == (256,)
    assert prompts.end_tokens(None, sequences.tokenizer("byte"), 256) == ()  # of a smaller model
    assert prompts.end_tokens(None, None, 512) == ()


@pytest.mark.parametrize("content", ("{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [-1]}'))
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        prompts.end_tokens(tmp_path, None, 512)
