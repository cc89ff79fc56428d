# SPDX-License-Identifier: Apache-2.0
"""Rows of vLLM, SGLang, verl and NeMo-RL as their documents have them, and what differences are called."""

import dataclasses
import json

import numpy as np
import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.inference import model as score_model
from tp_invariant_recipes.features.score import difference as score_difference
from tp_invariant_recipes.features.score import engine_scores
from tp_invariant_recipes.features.score.difference import Columns
from tp_invariant_recipes.features.score.rank import depends_on_rows


@dataclasses.dataclass
class Logprob:
    """vllm.logprobs."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def vllm(**more):
    """asdict of a RequestOutput (vllm.outputs), of which JSON makes text of the keys."""
    prompt = [None, {4: dataclasses.asdict(Logprob(-1.0, 1, " b")), 9: dataclasses.asdict(Logprob(-2.0, 2))}]
    output = {"index": 0, "text": " c", "token_ids": [5], "logprobs": [{5: dataclasses.asdict(Logprob(-0.5, 1, " c"))}]}
    return {"request_id": "r1", "prompt_token_ids": [3, 4], "prompt_logprobs": prompt, "outputs": [output], **more}


MESSAGES = [{"role": "user", "token_ids": [3, 4]},
            {"role": "assistant", "token_ids": [5], "generation_logprobs": [-0.5]}]  # fmt: skip
INPUT = {"input_token_logprobs": [[None, 3, None], [-1.0, 4, None]], "output_token_logprobs": [[-0.5, 5]]}
TOOL = {"responses": [5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 1, 0], "response_mask": [1, 0, 1, 0]}
# A row -> id, tokens, log-probabilities.
READ = {
    "vllm": (vllm(), ("r1", [3, 4, 5], [None, -1.0, -0.5])),
    "vllm without a prompt's": (vllm(prompt_logprobs=None), ("r1", [3, 4, 5], [None, None, -0.5])),
    "sglang": (
        {"text": " c", "meta_info": {"id": "x", "output_token_logprobs": [[-0.5, 5, " c"], [-0.25, 6, None]]}},
        (None, [5, 6], [-0.5, -0.25]),
    ),
    "sglang with its input": ({"id": 3, "meta_info": INPUT}, (3, [3, 4, 5], [None, -1.0, -0.5])),
    "verl": (
        {"responses": [5, 6, 0], "response_mask": [1, 1, 0], "rollout_log_probs": [-0.5, -0.25, 0.0], "prompts": [0]},
        (None, [5, 6], [-0.5, -0.25]),
    ),
    "verl with a tool's tokens": (
        TOOL | {"old_log_probs": [-0.5, 0.0, -0.25, 0.0]},
        (None, [5, 6, 7], [-0.5, None, -0.25]),
    ),
    "verl that ends with a tool's tokens": (
        TOOL | {"response_mask": [1, 0, 0, 0], "old_log_probs": [-0.5, 0.0, 0.0, 0.0]},
        (None, [5, 6, 7], [-0.5, None, None]),
    ),
    "nemo-rl": (
        {"input_ids": [3, 4, 5, 0], "input_lengths": 3, "token_mask": [0, 0, 1, 0],
         "generation_logprobs": [0, 0, -0.5, 0]},
        (None, [3, 4, 5], [None, None, -0.5]),
    ),
    "nemo-rl trainer's": ({"input_ids": [3, 4], "prev_logprobs": [0.0, -1.0]}, (None, [3, 4], [None, -1.0])),
    "nemo-rl messages": ({"message_log": MESSAGES}, (None, [3, 4, 5], [None, None, -0.5])),
    "plain without a probability": ({"token_ids": [5], "logprobs": [-float("inf")]}, (None, [5], [-10_000.0])),
    "plain": ({"id": "a", "token_ids": [5, 6], "logprobs": [None, -1.5]}, ("a", [5, 6], [None, -1.5])),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_rows_of_engines(name):
    row, expected = READ[name]
    result = engine_scores.parse(json.dumps(row).encode(), 1)
    assert (result.id, result.tokens, result.logprobs) == expected


WRONG = (
    ('{"texts": 1}', "no row of tpi score, vLLM, SGLang, verl or NeMo-RL"),
    ('{"token_ids": [1, 2], "logprobs": [-1.0]}', "lists of 2 and 1, of tokens, log-probabilities or a mask"),
    ('{"meta_info": {"output_token_logprobs": [[1]]}}', "a field is not as its program writes it"),
    ('{"prompt_token_ids": [1], "outputs": [{"token_ids": [2], "logprobs": [{"3": {"logprob": 0}}]}]}', "KeyError"),
    ('{"token_ids": [1], "logprobs": [NaN]}', "nan is not a log-probability"),
    ('{"token_ids": [1], "logprobs": [1e39]}', "1e[+]39 is not a log-probability"),
    (
        f'{{"token_ids": [1], "logprobs": [{"9" * 400}]}}',
        "9999 is not a log-probability|9{40} is not a log-probability",
    ),
    ('{"token_ids": [1], "logprobs": [true]}', "True is not a log-probability"),
    *(
        (f'{{"token_ids": [{token}], "logprobs": [-1]}}', f"{shown} is not the id of a token")
        for token, shown in (
            ("5.9", "5.9"), ('"5"', "'5'"), ("true", "True"), ("1e400", "inf"), (2**70, 2**70), (-1, -1),
        )
    ),
    *(
        (f'{{"id": {name}, "token_ids": [1], "logprobs": [-1]}}', "id must be text or a whole number")
        for name in ("[1]", "{}", "true", "1.5", 2**70)
    ),
    ('{"responses": [1, 2], "old_log_probs": [-1, -1], "response_mask": [0, 0]}', "no tokens in it"),
    ('{"responses": [1, 2], "old_log_probs": [-1, -1], "response_mask": [0, 7]}', "a mask is not 0 or 1"),
    *(
        (json.dumps(vllm(outputs=[{"token_ids": [5], "logprobs": [-1]}] * n)), f"{n} outputs .n > 1.: write a row")
        for n in (2, 4)
    ),
    ('{"id": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
    ('{"token_ids": [1], "token_ids": [2], "logprobs": [-1]}', "a key appears twice"),
)  # fmt: skip


@pytest.mark.parametrize("line, why", WRONG)
def test_rows_that_are_of_no_engine(tmp_path, line, why):
    file = tmp_path / "rollout.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{why}"):
        list(engine_scores.read(file))


LENGTH = 400


def columns(change=lambda item: item["reference"], seed=0):
    """Tokens of two sequences, drawn from categories of 50 tokens; `change` is the engine."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (2 * LENGTH, 50))
    drawn = rng.integers(0, 50, 2 * LENGTH)

    def logprobs(temperature=1.0):
        scaled = logits / temperature
        scaled = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
        return scaled

    whole = logprobs()
    single = {
        "sequence": np.repeat([0, 1], LENGTH), "position": np.tile(np.arange(1, LENGTH + 1), 2), "token": drawn,
        "reference": whole[np.arange(2 * LENGTH), drawn], "entropy": -(np.exp(whole) * whole).sum(1),
        "of": lambda temperature: logprobs(temperature)[np.arange(2 * LENGTH), drawn],
    }  # fmt: skip
    engine = change(single)
    single.pop("of")
    return Columns(**single, engine=engine)


def moved(item, size):
    return np.minimum(item["reference"] + np.random.default_rng(1).normal(0, 1, 2 * LENGTH) * size, -1e-3)


SHIFTED = "off by one: each token has the log-probability"
LAST = np.tile(np.arange(1, LENGTH + 1) == LENGTH, 2)
ONE = np.arange(2 * LENGTH) == 2 * LENGTH - 3
NAMED = {
    "2 tokens with 0.0, 2 of them the last of a sequence": lambda item: np.where(LAST, 0.0, item["reference"]),
    "8 tokens with 0.0: the engine": lambda item: np.where(item["position"] % 100 == 50, 0.0, item["reference"]),
    "1 token with -inf": lambda item: np.where(ONE, engine_scores.LEAST, item["reference"]),
    "values are probabilities, not": lambda item: np.exp(item["reference"]),
    "values are negative log-probabilities": lambda item: -item["reference"],
    "values are logarithms to base 2": lambda item: item["reference"] / np.log(2),
    "values are logarithms to base 10": lambda item: item["reference"] / np.log(10),
    "1 value of the engine above 0": lambda item: np.where(ONE, 0.5, item["reference"]),
    "1 token of 800 has 90% of the differences": lambda item: np.where(ONE, -90.0, item["reference"]),
    f"{SHIFTED} of the previous token": lambda item: np.roll(item["reference"], 1),
    f"{SHIFTED} of the next token": lambda item: np.roll(item["reference"], -1),
    "a temperature of about 0.9": lambda item: item["of"](0.9),
    "a temperature of about 1.19": lambda item: item["of"](1.2),
    "differences grow with the position": lambda item: moved(item, item["position"] / 100),
    "no cause looked for fits: the mean difference is 0.39": lambda item: moved(item, 0.5),
}


@pytest.mark.parametrize("name", NAMED)
def test_faults_are_named_and_nothing_else(name):
    result = score_difference.suspects(columns(NAMED[name]))
    assert len(result) == 1
    assert name in result[0]


def test_tokens_with_others_between_them_are_no_neighbours():
    """As of a file that has a value for each second token: no value is that of the next one."""
    shifted = columns(NAMED[f"{SHIFTED} of the next token"])
    wider = dataclasses.replace(shifted, position=2 * shifted.position)
    assert not any("off by one" in suspect for suspect in score_difference.suspects(wider))


def test_rounding_is_no_fault():
    assert score_difference.suspects(columns(lambda item: moved(item, 0.01))) == []


def test_figures():
    result = columns(lambda item: item["reference"] + np.where(np.arange(2 * LENGTH) == 7, 0.5, 0.0))
    figures = score_difference.summary(result)
    assert figures["equal"] == 2 * LENGTH - 1
    assert figures["outside"] == 1
    assert figures["largest"] == pytest.approx(0.5)
    assert figures["k1"] == pytest.approx(0.5 / 800)
    assert figures["k3"] == pytest.approx((np.exp(-0.5) - 0.5) / 800)
    first = score_difference.worst(result)[0]
    assert (first["sequence"], first["position"], first["token"]) == (0, 8, result.token[7])
    assert score_difference.by_token(result)[0]["token"] == result.token[7]
    assert sum(row["tokens"] for row in score_difference.by_position(result)) == 2 * LENGTH


CASES = (
    ("qwen3_next_toy", "gpu", True),  # in the interpreter its kernels take each sample by itself; no GPU has shown it
    ("qwen3_next_toy", "cpu", True),
    ("qwen3_moe_toy", "gpu", False),
    ("nemotron3_nano_toy", "gpu", True),  # a library's scan
    ("qwen3_toy precision=mxfp8", "gpu", True),
    ("qwen3_toy numerics=stock", "cpu", False),
)


@pytest.mark.parametrize("words, device, alone", CASES)
def test_rows(words, device, alone):
    model, *more = words.split()
    assert depends_on_rows(compose(model, more, device=device).config) is alone


def test_a_score_may_choose_how_ranks_sum_and_trains_nothing():
    choices = parse_all(["device.peer_memory=auto", "device.check_memory=false"])
    assert [score_model._refused(override, "tpi score") is None for override in choices] == [True, False]
