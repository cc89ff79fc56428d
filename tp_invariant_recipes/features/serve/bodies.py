# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: a field for each key that is taken, and the requests that follow.

Clients of SGLang and OpenAI always send some keys that have no meaning here. Of these one value is taken, their
default, and any value of keys that describe the client. null is the same as no key.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.errors import ConfigError, listed, refuse
from tp_invariant_recipes.features.rollouts import requests
from tp_invariant_recipes.features.rollouts.requests import SEEDS, Request, Sampling
from tp_invariant_recipes.features.serve.backend import Refused, Work
from tp_invariant_recipes.settings.keys import nearest

STOPS, STOP_BYTES = 64, 1024  # stop strings or tokens of a request, and bytes of a string
SCORED = 1 << 18  # tokens of a body of /score
SHOWN = 5  # problems of one message


def _temperature(value: float) -> float:
    if value != 0 and not requests.is_temperature(value):
        raise ValueError("must be 0 or from 1e-6 to 1e6")
    return value


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > STOPS or not all(map(_is_stop, texts)):
        raise ValueError(f"must be a text or a list of up to {STOPS}, each of 1 to {STOP_BYTES} bytes")
    return texts


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text.encode()) <= STOP_BYTES


def _one_or_more(value: Any) -> Any:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise ValueError("must be a text or a list of texts")
    return value


Tokens = Annotated[int, Field(ge=1, lt=1 << 31)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Texts = Annotated[Any, AfterValidator(_one_or_more)]
Idle = dict[str, tuple[Any, ...] | None]
ANY = None


class Body(BaseModel):
    """An object with these keys and no others. idle: keys without meaning here -> the values that are taken, or ANY."""

    model_config = ConfigDict(extra="forbid", strict=True)
    idle: ClassVar[Idle] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_meaning(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        taken = {key for key, value in body.items() if key in cls.idle and _is_taken(cls.idle[key], value)}
        return {key: value for key, value in body.items() if value is not None and key not in taken}


def _is_taken(values: tuple[Any, ...] | None, value: Any) -> bool:
    return values is None or value in values


class Draws(Body):
    """How tokens are drawn, in all routes."""

    temperature: Annotated[float, AfterValidator(_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    n: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    stop: Annotated[Any, AfterValidator(_stops)] = ()
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=STOPS)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    idle: ClassVar[Idle] = {
        **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), (0,)), "repetition_penalty": (1,),
        "spaces_between_special_tokens": (True,), "logit_bias": ({},),
    }  # fmt: skip

    def sampling(self, new: int, seed: int | None, ends: Sequence[int]) -> Sampling:
        """Return how a request samples. new: tokens, at most. ends: that end a text. Raises ConfigError."""
        stops = dict.fromkeys((*(() if self.ignore_eos else ends), *self.stop_token_ids))
        base = Sampling(max_new_tokens=new, eos_token_id=tuple(stops), stop_strings=tuple(self.stop))
        if self.temperature > 0:
            return replace(
                base, do_sample=True, temperature=self.temperature, top_k=max(0, self.top_k), top_p=self.top_p,
                seed=seed or 0, num_return_sequences=self.n,
            )  # fmt: skip
        has = {"top_p": self.top_p != 1, "top_k": self.top_k > 1, "n": self.n > 1, "seed": seed is not None}
        refuse([f"{key}: has no effect with temperature=0" for key, given in has.items() if given])
        return base


class SamplingParams(Draws):
    """`sampling_params` of SGLang."""

    max_new_tokens: Tokens = 128
    sampling_seed: Seed | None = None
    no_stop_trim: bool = False
    idle: ClassVar[Idle] = {
        **Draws.idle, "min_new_tokens": (0,), "stream_interval": (1,),
        **dict.fromkeys(("stop_regex", "regex", "json_schema", "ebnf", "structural_tag", "custom_params"), ()),
    }  # fmt: skip


class Generate(Body):
    """/generate of SGLang."""

    input_ids: list[Any] | None = None
    text: Texts = None
    sampling_params: Any = {}
    rid: Texts = None
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    return_text_in_logprobs: bool = False
    stream: bool = False
    bits: bool = False
    idle: ClassVar[Idle] = {
        "top_logprobs_num": (0,),
        **dict.fromkeys(
            ("return_hidden_states", "return_routed_experts", "return_bytes", "return_entropy", "background"), (False,)
        ),
        **dict.fromkeys(("log_metrics", "no_logs", "conversation_id", "routing_key"), ANY),
        **dict.fromkeys(
            (
                *("token_ids_logprob", "image_data", "video_data", "audio_data", "modalities", "input_embeds"),
                *("lora_path", "lora_id", "session_params", "custom_logit_processor", "bootstrap_host"),
                *("bootstrap_port", "bootstrap_room", "data_parallel_rank", "priority", "extra_key"),
            ),
            (),
        ),
    }


class StreamOptions(Body):
    """`stream_options` of OpenAI."""

    include_usage: bool = False


class OpenAI(Draws):
    """What OpenAI's routes share, with vLLM's keys for token ids."""

    model: str | None = None
    max_tokens: Tokens | None = None
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rid: str | None = None
    request_id: str | None = None
    bits: bool = False
    idle: ClassVar[Idle] = {
        **Draws.idle, "min_tokens": (0,), "response_format": ({"type": "text"},),
        **dict.fromkeys(("echo", "include_stop_str_in_output"), (False,)),
        **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier"), ANY),
        **dict.fromkeys(("priority", "cache_salt", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    }  # fmt: skip


class Completions(OpenAI):
    """/v1/completions of OpenAI."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    idle: ClassVar[Idle] = {**OpenAI.idle, "best_of": (1,), "add_special_tokens": (True,), "suffix": ()}


class Chat(OpenAI):
    """/v1/chat/completions of OpenAI."""

    messages: list[Any]
    logprobs: bool | None = None
    max_completion_tokens: Tokens | None = None
    idle: ClassVar[Idle] = {
        **OpenAI.idle, "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"),
        "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template_kwargs": ({},),
        "parallel_tool_calls": ANY, "reasoning_effort": (),
    }  # fmt: skip


class Update(Body):
    """/update_weights_from_disk of SGLang."""

    model_path: str
    step: Annotated[int, Field(ge=0, lt=1 << 40)] | None = None
    abort_all_requests: bool = False
    idle: ClassVar[Idle] = {
        "load_format": ("auto",), "flush_cache": (True,), "token_step": (0,), "weight_version": (), "manifest": (),
        **dict.fromkeys(("is_async", "keep_pause", "torch_empty_cache", "recapture_cuda_graph"), (False,)),
    }  # fmt: skip


class Pause(Body):
    """/pause_generation of SGLang."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(Body):
    """/abort_request of SGLang."""

    rid: str | None = None
    abort_all: bool = False
    idle: ClassVar[Idle] = {"abort_message": ANY, "finished_reason": ()}


class Plain(Body):
    """/continue_generation and /flush_cache of SGLang."""

    idle: ClassVar[Idle] = {"timeout": ANY, "torch_empty_cache": ANY}


IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")  # of a message that was sampled
# Keys of a row of `tpi score`, whose values data/sequences.py reads.
ROW = (
    *("id", "tokens", "attention_mask", "cu_seqlens", "text", "prompt", "response", "messages", "prompt_token_ids"),
    *("token_ids", "prompt_length"),
)


def checked[B: Body](kind: type[B], body: Any, within: str = "") -> B:
    """Return a body. Raises Refused that names wrong keys."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        keys = [f"{within}{problem['loc'][0] if problem['loc'] else 'body'}" for problem in problems]
        lines = dict.fromkeys(f"{key}: {_text(kind, one)}" for key, one in zip(keys, problems, strict=True))
        raise Refused(400, "\n".join([*lines][:SHOWN]), keys[0]) from None


def _text(kind: type[Body], problem: Any) -> str:
    text, key = problem["msg"].removeprefix("Value error, "), str((*problem["loc"], "")[0])
    if problem["type"] == "extra_forbidden" and key in kind.idle:
        taken = " or ".join(map(json.dumps, kind.idle[key] or (None,)))
        return f"has no effect here; leave it out, or {taken}"
    if problem["type"] == "extra_forbidden":
        return f"no such key{nearest(key, [*kind.model_fields])}"
    return f"{text[0].lower()}{text[1:]}"


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

    def generate(self, body: Any) -> tuple[list[Work], Generate, list[SamplingParams]]:
        """Return the requests of a body of /generate, the body, and how each samples. Raises Refused."""
        given = checked(Generate, body)
        source = _one_of(input_ids=given.input_ids, text=given.text)
        if source is None:
            raise Refused(400, "input_ids, text: a request has one of both", "input_ids")
        prompts = self._tokens(source, "input_ids")
        params = given.sampling_params
        several = params if isinstance(params, list) else [params] * len(prompts)
        if len(several) != len(prompts):
            raise Refused(400, f"sampling_params: {len(several)} for {len(prompts)} prompts", "sampling_params")
        each = [checked(SamplingParams, one, "sampling_params.") for one in several]
        if given.logprob_start_len >= 0 and (given.stream or not given.return_logprob):
            text = "has no effect without return_logprob, and with stream; /score scores a prompt"
            raise Refused(400, f"logprob_start_len: {text}", "logprob_start_len")
        first = given.logprob_start_len if given.logprob_start_len >= 0 else None
        seeds = [one.sampling_seed for one in each]
        limits = [one.max_new_tokens for one in each]
        return self._works(prompts, each, limits, seeds, given.rid, given.stream, first), given, each

    def openai(self, kind: type[OpenAI], body: Any) -> tuple[list[Work], OpenAI]:
        """Return the requests of a body of OpenAI's routes, and the body. Raises Refused."""
        given = checked(kind, body)
        if given.model is not None and given.model not in self.names:
            raise Refused(404, f"model: there is no {given.model!r:.80}; the server has {self.names[0]}", "model")
        if given.stream_options is not None and not given.stream:
            raise Refused(400, "stream_options: has no effect without stream", "stream_options")
        rid = _one_of(rid=given.rid, request_id=given.request_id)
        if isinstance(given, Chat):
            new = _one_of(max_tokens=given.max_tokens, max_completion_tokens=given.max_completion_tokens) or 1024
            tokens = [self._conversation(given.messages)]
        else:
            new, tokens = given.max_tokens or 16, self._tokens(getattr(given, "prompt", None), "prompt")
        count = len(tokens)
        return self._works(tokens, [given] * count, [new] * count, [given.seed] * count, rid, given.stream), given

    def score(self, body: Mapping[str, Any]) -> list[sequences.Sequence]:
        """Return the sequences of a body of /score. Raises Refused."""
        rows = body.get("sequences", [body])
        if "sequences" in body and (len(body) > 1 or not isinstance(rows, list)):
            raise Refused(400, "sequences: must be a list of rows, and no other key stands beside it", "sequences")
        found: list[sequences.Sequence] = []
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or (unknown := [key for key in row if key not in ROW]):
                key = unknown[0] if isinstance(row, dict) else "sequences"
                raise Refused(400, f"{key}: row {number} is no object with keys of {', '.join(ROW)}", key)
            try:
                found += sequences.parse(json.dumps(row).encode(), number, self.vocabulary, self.codec)
            except ValueError as error:
                raise Refused(400, f"row {number}: {error}", "sequences") from error
        if (count := sum(len(each.tokens) for each in found)) > SCORED:
            raise Refused(413, f"{count} tokens are more than the {SCORED} that a request may score", "sequences")
        if not found or max(len(each.tokens) for each in found) > self.longest:
            raise Refused(400, f"sequences: at least one, each of at most {self.longest} tokens", "sequences")
        return found

    def _tokens(self, value: Any, key: str) -> list[list[int]]:
        """Return one prompt or several."""
        several = isinstance(value, list) and value and isinstance(value[0], list | str)
        encode = self.codec.encode if self.codec else None
        try:
            return [sequences.ids(one, key, encode, special=True) for one in (value if several else [value])]
        except ValueError as error:
            raise Refused(400, str(error), key) from error

    def _conversation(self, messages: list[Any]) -> list[int]:
        """Return the ids of messages and of the start of an answer.

        Where messages have the ids that they were sampled with, as NeMo Gym sends them, these are taken up to the end
        of the last such answer, since its text may have others.
        """
        texts = [
            {key: value for key, value in message.items() if key not in IDS} if isinstance(message, dict) else message
            for message in messages
        ]
        last = max((n for n, message in enumerate(messages) if texts[n] != message), default=None)
        try:
            whole = sequences.conversation(self.codec, texts, answer=True)
            if last is None:
                return whole
            sampled = [t for key in IDS[:2] for t in sequences.ids(messages[last].get(key), f"messages.{key}", None)]
            before = sequences.conversation(self.codec, texts[: last + 1], answer=False)
            end = max((n for n, token in enumerate(before) if token in self.ends), default=None)
            if end is None or whole[: end + 1] != before[: end + 1]:
                raise ValueError(
                    "messages have token ids, and the chat template does not end an answer by an end token"
                )
            return sampled[: -1 if sampled[-1:] and sampled[-1] in self.ends else None] + whole[end:]
        except ValueError as error:
            raise Refused(400, str(error), "messages") from error

    def _works(
        self, prompts: Sequence[list[int]], each: Sequence[Draws], limits: Sequence[int],
        seeds: Sequence[int | None], rid: Any, stream: bool, first: int | None = None,
    ) -> list[Work]:  # fmt: skip
        seeded = all(draws.temperature == 0 or seed is not None for draws, seed in zip(each, seeds, strict=True))
        works = []
        ids = _names(rid, len(prompts), seeded=seeded)
        for name, tokens, draws, new, seed in zip(ids, prompts, each, limits, seeds, strict=True):
            try:
                request = Request(name, tuple(tokens), draws.sampling(new, seed, self.ends))
            except ConfigError as error:
                raise Refused(400, str(error), str(error).partition(":")[0]) from error
            if problems := [*requests.unfit(request, self.vocabulary, self.longest, self.codec is not None)]:
                raise Refused(400, listed(problems))
            works.append(Work(request, stream, first))
        return works


def _one_of(**values: Any) -> Any:
    """Return the value that was given; None: none was. Raises Refused: several were."""
    given = {key: value for key, value in values.items() if value is not None}
    if len(given) > 1:
        raise Refused(400, f"{', '.join(values)}: one of both", next(iter(values)))
    return next(iter(given.values()), None)


def _names(rid: Any, count: int, *, seeded: bool) -> list[str]:
    """Return the ids of a body's prompts, which name their draws.

    Without `rid`: their places, from 1 on, where there is a seed, as lines of a file of `tpi generate`; else new ones.
    """
    if isinstance(rid, list):
        if len(rid) != count:
            raise Refused(400, f"rid: {len(rid)} ids for {count} prompts", "rid")
        return rid
    if rid is not None:
        return [rid] if count == 1 else [f"{rid}_{n}" for n in range(count)]
    return [str(n + 1) if seeded else uuid.uuid4().hex for n in range(count)]
