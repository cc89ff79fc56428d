# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities that an engine or trainer returned, as JSONL: one object a sequence, in the fields of its program.

    tpi score   id, token_ids, logprobs                                            features/inference/output.py
    vLLM        prompt_token_ids, prompt_logprobs, outputs[0].token_ids, .logprobs  vllm.outputs, vllm.logprobs:
                a list of {token id: {"logprob": …}} or of numbers; the first of a prompt is null; n = 1
    SGLang      meta_info.input_token_logprobs, .output_token_logprobs             docs, native API ("return_logprob"):
                lists of [logprob, token id, text]; the first of an input has null
    verl        responses, rollout_log_probs or old_log_probs, response_mask       verl.trainer.ppo.ray_trainer,
                docs "rollout correction": of the response, padded at its end
    NeMo-RL     input_ids, generation_logprobs or prev_logprobs, token_mask        docs "Generation Interface":
                as long as the sequence, at the place of the token; or message_log of messages with token_ids

A row is a dataclass as `dataclasses.asdict` or a table's `to_json(orient="records", lines=True)` writes it. An `id`
names its sequence; if no row has one, they are in the order of the sequences. Masked tokens have no log-probability.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.data.sequences import check_id
from tp_invariant_recipes.errors import ConfigError, reason
from tp_invariant_recipes.reading import TOKENS, parse_object, read_lines

LEAST = -10_000.0  # what stands for -inf, of a token that a filter has left no probability
LARGEST = 1 << 31  # of tokens, which no vocabulary has
Spans = tuple[list[int], list[float | None]]


@dataclass(frozen=True)
class Rollout:
    """The last tokens of a sequence, and their log-probabilities; None: none was returned.

    id: None: the row has none. line: of the file. digests: of tpi generate and tpi score, of each token; empty: none.
    """

    id: str | int | None
    line: int
    tokens: list[int]
    logprobs: list[float | None]
    digests: Sequence[str] = ()


def read(file: Path) -> Iterator[Rollout]:
    """Yield the rows of a file as they are read. Raises ConfigError that names the line."""
    number = 0
    try:
        for number, line in read_lines(file):
            if line.strip():
                yield parse(line, number)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file}, line {number}: {reason(error)}") from error


def parse(line: bytes, number: int) -> Rollout:
    """Return a row of any of FORMATS. number: the line's. Raises ValueError: it is of none."""
    row = parse_object(line, constants=True, most=TOKENS)
    spans = next((spans for needed, spans in FORMATS if all(_has(row, key) for key in needed)), None)
    if spans is None:
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"no row of tpi score, vLLM, SGLang, verl or NeMo-RL (docs/scores.md); its keys: {keys}")
    try:
        tokens, logprobs = spans(row)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"a field is not as its program writes it: {error!r}") from error
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities")
    if not tokens:
        raise ValueError("no tokens in it")
    if wrong := [token for token in tokens if type(token) is not int or not 0 <= token < LARGEST]:
        raise ValueError(f"{wrong[0]!r:.40} is not the id of a token")
    if odd := [x for x in logprobs if x is not None and (type(x) not in (int, float) or not x <= -LEAST)]:
        raise ValueError(f"{odd[0]!r:.40} is not a log-probability")
    name = row.get("id", row.get("request_id"))
    values = [None if x is None else float(max(x, LEAST)) for x in logprobs]
    digests = row.get("digests") or ()
    if digests and not (isinstance(digests, list) and len(digests) == len(tokens)):
        raise ValueError(f"digests are no list of {len(tokens)}, one a token")
    return Rollout(None if name is None else check_id(name), number, tokens, values, digests)


def _has(row: Mapping[str, Any], key: str) -> bool:
    outer, _, inner = key.partition(".")
    return row.get(outer) is not None and (not inner or (isinstance(row[outer], Mapping) and inner in row[outer]))


def _paired(values: Sequence[Any], others: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    if len(values) != len(others):
        raise ValueError(f"lists of {len(values)} and {len(others)}, of tokens, log-probabilities or a mask")
    return zip(values, others, strict=True)


def _plain(row: Mapping[str, Any]) -> Spans:
    return row["token_ids"], [_logprob(value, token) for token, value in _paired(row["token_ids"], row["logprobs"])]


def _vllm(row: Mapping[str, Any]) -> Spans:
    prompt = row["prompt_token_ids"]
    before = row.get("prompt_logprobs") or [None] * len(prompt)
    if len(row.get("outputs") or ()) > 1:
        raise ValueError(f"{len(row['outputs'])} outputs (n > 1): write a row with its own id for each")
    output = row["outputs"][0] if row.get("outputs") else {"token_ids": [], "logprobs": []}
    after = output.get("logprobs") or [None] * len(output["token_ids"])
    tokens, values = [*prompt, *output["token_ids"]], [*before, *after]
    return tokens, [_logprob(value, token) for token, value in _paired(tokens, values)]


def _logprob(value: Any, token: int) -> float | None:
    """Return a number, or the entry of the token among those that vLLM returned for its place."""
    if not isinstance(value, Mapping):
        return value
    entry = value[str(token)] if str(token) in value else value[token]
    return entry["logprob"] if isinstance(entry, Mapping) else entry


def _sglang(row: Mapping[str, Any]) -> Spans:
    meta = row["meta_info"]
    entries = [*(meta.get("input_token_logprobs") or ()), *meta["output_token_logprobs"]]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _verl(row: Mapping[str, Any]) -> Spans:
    tokens = row["responses"]
    values = row["rollout_log_probs"] if row.get("rollout_log_probs") is not None else row["old_log_probs"]
    # A token of a tool is one of the sequence: `response_mask` is 0 there, and `attention_mask` is 1.
    attention, response = row.get("attention_mask"), row.get("response_mask")
    mask = _mask(response if response is not None else (attention or ())[-len(tokens) :] or None, tokens)
    kept = mask if attention is None else _mask(attention[-len(tokens) :], tokens)
    end = max((n for n, bit in enumerate(kept, 1) if bit), default=0)
    return tokens[:end], [value if bit else None for value, bit in _paired(values[:end], mask[:end])]


def _nemo(row: Mapping[str, Any]) -> Spans:
    length = row.get("input_lengths", len(row["input_ids"]))
    values = row["generation_logprobs"] if row.get("generation_logprobs") is not None else row["prev_logprobs"]
    mask = _mask(row.get("token_mask"), row["input_ids"], first=1)
    tokens = row["input_ids"][:length]
    return tokens, [x if bit else None for x, bit in _paired(values[:length], mask[:length])]


def _mask(mask: Any, tokens: Any, first: int = 0) -> list[int]:
    """Return the mask, without one all tokens from `first` on. ValueError: it is not 0 or 1 for each token."""
    if mask is None:
        return [int(n >= first) for n in range(len(tokens))]
    if not isinstance(mask, list) or len(mask) != len(tokens) or any(bit not in (0, 1) for bit in mask):
        raise ValueError("a mask is not 0 or 1 for each token")
    return mask


def _messages(row: Mapping[str, Any]) -> Spans:
    tokens: list[int] = []
    values: list[float | None] = []
    for message in row["message_log"]:
        tokens += message["token_ids"]
        values += message.get("generation_logprobs") or [None] * len(message["token_ids"])
    return tokens, values


# Keys that a row has -> its tokens and log-probabilities.
FORMATS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Spans]], ...] = (
    (("meta_info.output_token_logprobs",), _sglang),
    (("prompt_token_ids", "outputs"), _vllm),
    (("prompt_token_ids", "prompt_logprobs"), _vllm),
    (("responses", "rollout_log_probs"), _verl),
    (("responses", "old_log_probs"), _verl),
    (("input_ids", "generation_logprobs"), _nemo),
    (("input_ids", "prev_logprobs"), _nemo),
    (("message_log",), _messages),
    (("token_ids", "logprobs"), _plain),
)
