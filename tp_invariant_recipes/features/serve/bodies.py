# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: which keys they have, what their values may be, and the requests that follow.

A key is a row of a table. Clients of SGLang and OpenAI send some keys always, which have no meaning here: one value of
these is taken, that of their default, and any value of keys that describe the client.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.errors import ConfigError, listed
from tp_invariant_recipes.features.rollouts import requests
from tp_invariant_recipes.features.rollouts.requests import SEEDS, Request, Sampling
from tp_invariant_recipes.features.serve.backend import PAUSES, Refused, Work
from tp_invariant_recipes.settings.keys import nearest

STOPS, STOP_BYTES = 64, 1024  # stop strings or tokens of a request, and bytes of a string
SCORED = 1 << 18  # tokens of a body of /score
CHAT_TOKENS = 1024  # new tokens of an answer in a chat, by default

Test = Callable[[Any], bool]
Key = tuple[Test, str]  # whether a value is right, and what it must be


def _is(kind: type, value: Any) -> bool:
    return type(value) is kind


def _in(least: float, most: float, kinds: tuple[type, ...], value: Any) -> bool:
    return type(value) in kinds and least <= value <= most


def _whole(least: int, most: int) -> Key:
    return partial(_in, least, most, (int,)), f"must be a whole number from {least} to {most}"


def _number(least: float, most: float) -> Key:
    return partial(_in, least, most, (int, float)), f"must be a number from {least:g} to {most:g}"


def _temperature(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or requests.is_temperature(value))


def _texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= STOPS and all(map(_stop, texts))


def _stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text.encode()) <= STOP_BYTES


def _ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= STOPS and requests.are_tokens(value)


def _list_of(kind: type, value: Any) -> bool:
    return isinstance(value, kind) or (isinstance(value, list) and all(isinstance(item, kind) for item in value))


def _among(values: Sequence[Any], value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in values)


def _only(*values: Any) -> Key:
    """Return a key without meaning here, of which these values are taken, or null."""
    shown = " or ".join("null" if value is None else repr(value).lower() for value in values or (None,))
    return partial(_among, values), f"has no effect here; leave it out, or {shown}"


def _any(value: Any) -> bool:
    return True


BOOL: Key = (partial(_is, bool), "must be true or false")
TEXT: Key = (partial(_is, str), "must be text")
ANY: Key = (_any, "")
_DRAWS: dict[str, Key] = {
    "temperature": (_temperature, "must be 0 or from 1e-6 to 1e6"),
    "top_p": (lambda value: requests.is_share(value), "must be above 0 and at most 1"),
    "top_k": (partial(_in, -1, 1 << 31, (int,)), "must be a whole number; -1 and 0: all tokens"),
    "n": _whole(1, 1 << 16),
    "stop": (_texts, f"must be a text or a list of up to {STOPS}, each of 1 to {STOP_BYTES} bytes"),
    "stop_token_ids": (_ids, f"must be a list of up to {STOPS} token ids"),
    "ignore_eos": BOOL,
}
SAMPLING: dict[str, Key] = {
    **_DRAWS, "max_new_tokens": _whole(1, (1 << 31) - 1), "sampling_seed": _whole(0, SEEDS - 1),
    "min_p": _only(0, 0.0), "min_new_tokens": _only(0), "frequency_penalty": _only(0, 0.0),
    "presence_penalty": _only(0, 0.0), "repetition_penalty": _only(1, 1.0), "skip_special_tokens": BOOL,
    "spaces_between_special_tokens": _only(True), "no_stop_trim": BOOL, "stream_interval": _only(1),
    **dict.fromkeys(
        ("stop_regex", "regex", "json_schema", "ebnf", "structural_tag", "logit_bias", "custom_params"), _only()
    ),
}  # fmt: skip
GENERATE: dict[str, Key] = {
    "input_ids": (partial(_is, list), "must be a list of token ids, or of such lists"),
    "text": (partial(_list_of, str), "must be a text or a list of texts"),
    "sampling_params": (partial(_list_of, dict), "must be an object, or one for each prompt"),
    "rid": (partial(_list_of, str), "must be a text, or one for each prompt"),
    "return_logprob": BOOL, "logprob_start_len": _whole(-1, 1 << 31), "return_text_in_logprobs": BOOL,
    "stream": BOOL, "bits": BOOL, "top_logprobs_num": _only(0), "return_hidden_states": _only(False),
    "return_routed_experts": _only(False), "background": _only(False),
    **dict.fromkeys(("log_metrics", "no_logs", "conversation_id", "routing_key"), ANY),
    **dict.fromkeys(
        (
            *("token_ids_logprob", "image_data", "video_data", "audio_data", "modalities", "input_embeds"),
            *("lora_path", "lora_id", "session_params", "custom_logit_processor", "bootstrap_host"),
            *("bootstrap_port", "bootstrap_room", "data_parallel_rank", "priority", "extra_key"),
        ),
        _only(),
    ),
}  # fmt: skip
_OPENAI: dict[str, Key] = {
    **_DRAWS, "model": TEXT, "max_tokens": _whole(1, (1 << 31) - 1), "seed": _whole(0, SEEDS - 1), "stream": BOOL,
    "stream_options": (partial(_is, dict), "must be an object"), "return_token_ids": BOOL, "bits": BOOL,
    "return_tokens_as_token_ids": BOOL, "rid": TEXT, "request_id": TEXT, "skip_special_tokens": BOOL,
    "frequency_penalty": _only(0, 0.0), "presence_penalty": _only(0, 0.0), "repetition_penalty": _only(1, 1.0),
    "min_p": _only(0, 0.0), "min_tokens": _only(0), "logit_bias": _only({}),
    "spaces_between_special_tokens": _only(True), "include_stop_str_in_output": _only(False),
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier"), ANY),
    **dict.fromkeys(("priority", "cache_salt", "prompt_logprobs", "truncate_prompt_tokens"), _only()),
}  # fmt: skip
COMPLETIONS: dict[str, Key] = {
    **_OPENAI, "prompt": ANY, "logprobs": _whole(0, 1), "echo": _only(False), "best_of": _only(1),
    "suffix": _only(), "add_special_tokens": _only(True), "response_format": _only({"type": "text"}),
}  # fmt: skip
CHAT: dict[str, Key] = {
    **_OPENAI, "messages": (partial(_is, list), "must be a list of messages"), "logprobs": BOOL,
    "top_logprobs": _only(0), "max_completion_tokens": _whole(1, (1 << 31) - 1),
    "response_format": _only({"type": "text"}), "tools": _only([]), "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": ANY, "add_generation_prompt": _only(True), "continue_final_message": _only(False),
    "chat_template_kwargs": _only({}), "reasoning_effort": _only(), "echo": _only(False),
}  # fmt: skip
UPDATE: dict[str, Key] = {
    "model_path": TEXT, "step": _whole(0, 1 << 40), "abort_all_requests": BOOL, "flush_cache": _only(True),
    "load_format": _only("auto"), "is_async": _only(False), "keep_pause": _only(False), "token_step": _only(0),
    "torch_empty_cache": _only(False), "recapture_cuda_graph": _only(False), "weight_version": _only(),
    "manifest": _only(),
}  # fmt: skip
PAUSE: dict[str, Key] = {"mode": (partial(_among, PAUSES), f"must be one of {', '.join(PAUSES)}")}
ABORT_KEYS: dict[str, Key] = {"rid": TEXT, "abort_all": BOOL, "abort_message": ANY, "finished_reason": _only()}
CONTINUE: dict[str, Key] = {"torch_empty_cache": _only(False, True)}
EMPTY: dict[str, Key] = {"timeout": ANY}
_ROW = ("id", "tokens", "attention_mask", "cu_seqlens", "text", "prompt", "response", "messages", "prompt_token_ids")
SCORE: dict[str, Key] = {
    **dict.fromkeys((*_ROW, "token_ids", "prompt_length"), ANY),
    "sequences": (partial(_is, list), "must be rows"),
}


def check(body: Mapping[str, Any], keys: Mapping[str, Key], within: str = "") -> dict[str, Any]:
    """Return the values of a body that are not null. Raises Refused that names each wrong key."""
    wrong = [f"{within}{key}: no such key{nearest(key, [*keys])}" for key in body if key not in keys]
    given = {key: value for key, value in body.items() if value is not None and key in keys}
    for key, value in given.items():
        test, must = keys[key]
        if not test(value):
            wrong.append(f"{within}{key}={_short(value)}: {must}")
    if wrong:
        first = next(key for key in body if key not in keys or (key in given and not keys[key][0](body[key])))
        raise Refused(400, "\n".join(wrong[:5]), f"{within}{first}")
    return given


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@dataclass(frozen=True)
class Prompts:
    """What requests are read with.

    codec: None: there is no tokenizer. ends: tokens that end a text. longest: tokens of a prompt with its completion.
    names: of the model.
    """

    codec: Codec | None
    vocabulary: int
    ends: tuple[int, ...]
    longest: int
    names: tuple[str, ...]

    def ids(self, value: Any, key: str) -> list[int]:
        """Return token ids, or those of a text. Raises Refused."""
        try:
            if key == "input_ids" and isinstance(value, str):
                raise ValueError("input_ids must be token ids; text is text")
            return sequences.ids(value, key, self.codec.encode if self.codec else None, special=True)
        except ValueError as error:
            raise Refused(400, str(error), key) from error

    def work(self, work: Work) -> Work:
        """Return what fits the model. Raises Refused."""
        found = requests.unfit(work.request, self.vocabulary, self.longest, self.codec is not None)
        if problems := [*found]:
            raise Refused(400, listed(problems))
        return work

    def sampling(self, given: Mapping[str, Any], seed: str, new: int) -> Sampling:
        """Return how a request samples. seed: the key that is its seed. new: its tokens, at most. Raises Refused."""
        ends = () if given.get("ignore_eos") else self.ends
        fields: dict[str, Any] = {
            "max_new_tokens": new, "eos_token_id": tuple(dict.fromkeys((*ends, *given.get("stop_token_ids", ())))),
            "stop_strings": given.get("stop"),
        }  # fmt: skip
        if given.get("temperature", 1) == 0:
            idle = {"top_p": 1, "top_k": (-1, 0, 1), "n": 1, seed: ()}
            for key, neutral in idle.items():
                if key in given and given[key] not in (neutral if isinstance(neutral, tuple) else (neutral,)):
                    raise Refused(400, f"{key}={_short(given[key])}: has no effect with temperature=0", key)
        else:
            fields |= {
                "do_sample": True, "temperature": given.get("temperature", 1.0), "top_p": given.get("top_p", 1.0),
                "top_k": max(0, given.get("top_k", 0)), "num_return_sequences": given.get("n", 1),
                "seed": given.get(seed, 0),
            }  # fmt: skip
        try:
            return Sampling(**fields)
        except ConfigError as error:
            raise Refused(400, str(error)) from error


def names(rid: Any, count: int, *, seeded: bool, single: bool) -> list[str]:
    """Return the ids of a body's prompts, which name their draws.

    Without `rid`: their places, from 1 on, where there is a seed, as lines of a file of `tpi generate`; else new ones.
    """
    if isinstance(rid, list):
        if len(rid) != count:
            raise Refused(400, f"rid: {len(rid)} ids for {count} prompts", "rid")
        return rid
    if rid is not None:
        return [rid] if single else [f"{rid}_{n}" for n in range(count)]
    return [str(n + 1) if seeded else uuid.uuid4().hex for n in range(count)]


def generate(body: Mapping[str, Any], prompts: Prompts) -> tuple[list[Work], dict[str, Any], bool]:
    """Return the requests of a body of SGLang's /generate, its other values, and whether it has one prompt."""
    given = check(body, GENERATE)
    sources = [key for key in ("input_ids", "text") if key in given]
    if len(sources) != 1:
        raise Refused(400, "a request has either input_ids or text", "input_ids")
    value = given[sources[0]]
    single = isinstance(value, str) or not (isinstance(value, list) and value and isinstance(value[0], list | str))
    values = [value] if single else value
    params = given.get("sampling_params", {})
    if isinstance(params, list) and len(params) != len(values):
        raise Refused(400, f"sampling_params: {len(params)} objects for {len(values)} prompts", "sampling_params")
    several = params if isinstance(params, list) else [params] * len(values)
    checked = [check(each, SAMPLING, "sampling_params.") for each in several]
    seeded = all("sampling_seed" in each or each.get("temperature") == 0 for each in checked)
    start = given.get("logprob_start_len", -1)
    if start >= 0 and not given.get("return_logprob"):
        raise Refused(400, "logprob_start_len: has no effect without return_logprob", "logprob_start_len")
    works = []
    ids = names(given.get("rid"), len(values), seeded=seeded, single=single)
    for name, tokens, each in zip(ids, values, checked, strict=True):
        sampling = prompts.sampling(each, "sampling_seed", each.get("max_new_tokens", 128))
        request = _request(name, prompts.ids(tokens, sources[0]), sampling)
        works.append(prompts.work(Work(request, bool(given.get("stream")), start if start >= 0 else None)))
    for key in ("skip_special_tokens", "no_stop_trim"):
        if len({each.get(key) for each in checked}) > 1:
            raise Refused(400, f"sampling_params.{key}: must be the same for all prompts of a request", key)
        given[key] = checked[0].get(key, key == "skip_special_tokens")
    return works, given, single


def _request(name: str, tokens: list[int], sampling: Sampling) -> Request:
    return Request(name, tuple(tokens), sampling)


def completions(body: Mapping[str, Any], prompts: Prompts) -> tuple[list[Work], dict[str, Any]]:
    """Return the requests of a body of OpenAI's /v1/completions, and its other values."""
    given = _openai(body, COMPLETIONS, prompts)
    value = given.get("prompt")
    if value is None:
        raise Refused(400, "prompt: is missing", "prompt")
    single = isinstance(value, str) or not (isinstance(value, list) and value and isinstance(value[0], list | str))
    tokens = [prompts.ids(each, "prompt") for each in ([value] if single else value)]
    return _works(given, tokens, given.get("max_tokens", 16), single, prompts), given


def chat(body: Mapping[str, Any], prompts: Prompts) -> tuple[list[Work], dict[str, Any]]:
    """Return the request of a body of OpenAI's /v1/chat/completions, and its other values."""
    given = _openai(body, CHAT, prompts)
    if {"max_tokens", "max_completion_tokens"} <= given.keys():
        raise Refused(400, "max_tokens and max_completion_tokens: one of both", "max_tokens")
    if "messages" not in given:
        raise Refused(400, "messages: is missing", "messages")
    try:
        tokens = sequences.conversation(prompts.codec, given["messages"], answer=True)
    except ValueError as error:
        raise Refused(400, str(error), "messages") from error
    new = given.get("max_completion_tokens", given.get("max_tokens", CHAT_TOKENS))
    return _works(given, [tokens], new, True, prompts), given


def _openai(body: Mapping[str, Any], keys: Mapping[str, Key], prompts: Prompts) -> dict[str, Any]:
    given = check(body, keys)
    if given.get("model", prompts.names[0]) not in prompts.names:
        raise Refused(404, f"model={_short(given['model'])}: the server has {prompts.names[0]}", "model")
    options = check(given.get("stream_options", {}), {"include_usage": BOOL}, "stream_options.")
    if options and not given.get("stream"):
        raise Refused(400, "stream_options: has no effect without stream", "stream_options")
    given["include_usage"] = options.get("include_usage", False)
    if "rid" in given and "request_id" in given:
        raise Refused(400, "rid and request_id: one of both", "rid")
    return given


def _works(given: Mapping[str, Any], tokens: list[list[int]], new: int, single: bool, prompts: Prompts) -> list[Work]:
    sampling = prompts.sampling(given, "seed", new)
    seeded = "seed" in given or not sampling.do_sample
    ids = names(given.get("rid", given.get("request_id")), len(tokens), seeded=seeded, single=single)
    requested = [_request(name, each, sampling) for name, each in zip(ids, tokens, strict=True)]
    return [prompts.work(Work(request, bool(given.get("stream")))) for request in requested]


def score(body: Mapping[str, Any], prompts: Prompts, encoded: Callable[[Any], bytes]) -> list[sequences.Sequence]:
    """Return the sequences of a body of /score: a row of `tpi score`, or several as `sequences`. Raises Refused."""
    given = check(body, SCORE)
    if "sequences" in given and len(given) > 1:
        raise Refused(400, "sequences: no other key stands beside it", "sequences")
    rows = given.get("sequences", [given])
    found: list[sequences.Sequence] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise Refused(400, f"sequences: row {number} is no object", "sequences")
        check(row, {key: ANY for key in SCORE if key != "sequences"}, f"sequences[{number - 1}].")
        try:
            found += sequences.parse(encoded(row), number, prompts.vocabulary, prompts.codec)
        except ValueError as error:
            raise Refused(400, f"row {number}: {error}", "sequences") from error
    if not found:
        raise Refused(400, "sequences: there are none", "sequences")
    if any(len(each.tokens) > prompts.longest for each in found):
        raise Refused(400, f"a sequence has more than {prompts.longest} tokens", "sequences")
    if (count := sum(len(each.tokens) for each in found)) > SCORED:
        raise Refused(413, f"{count} tokens are more than the {SCORED} that a request may score", "sequences")
    return found
