# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: a field for each key that has an effect, and the requests that follow from it.

null is the same as no key.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.errors import listed
from tp_invariant_recipes.features.rollouts import requests
from tp_invariant_recipes.features.rollouts.requests import SEEDS, Request, Sampling
from tp_invariant_recipes.features.serve.backend import Refused
from tp_invariant_recipes.settings.keys import nearest

STOPS, STOP_LENGTH = 64, 1024  # stop strings or tokens of a request, and characters of a string
SCORED = 1 << 18  # tokens of a body of /score
SHOWN = 5  # problems of one message
# Keys that clients always send and that have no effect here -> the values that are taken, in any body.
IDLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens", "min_tokens"), (0,)),
    **dict.fromkeys(("top_logprobs", "top_logprobs_num", "token_step"), (0,)),
    **dict.fromkeys(("repetition_penalty", "stream_interval", "best_of"), (1,)),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_bytes", "return_entropy"), (False,)),
    **dict.fromkeys(("return_text_in_logprobs", "background", "echo", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("continue_final_message", "is_async", "keep_pause", "recapture_cuda_graph"), (False,)),
    **dict.fromkeys(("flush_cache", "add_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("spaces_between_special_tokens", "torch_empty_cache", "parallel_tool_calls"), (True, False)),
    **{"load_format": ("auto",), "tools": ([],), "tool_choice": ("none", "auto"), "logit_bias": ({},)},
    **{"response_format": ({"type": "text"},), "chat_template_kwargs": ({},)},
}
# Keys that describe the client; any value is taken.
UNREAD = {
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier", "log_metrics", "no_logs"),
    *("conversation_id", "routing_key", "abort_message"),
}


def _temperature(value: float) -> float:
    if value != 0 and not requests.is_temperature(value):
        raise ValueError("must be 0 or from 1e-6 to 1e6")
    return value


Tokens = Annotated[int, Field(ge=1, lt=1 << 31)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Stop = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]


class Body(BaseModel):
    """An object with these keys and no others, but for IDLE and UNREAD."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {k: v for k, v in body.items() if not (v is None or k in UNREAD or v in IDLE.get(k, ()))}


class Draws(Body):
    """How tokens are drawn, and where their text ends, in all routes."""

    temperature: Annotated[float, AfterValidator(_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    n: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    stop: Annotated[
        list[Stop], Field(max_length=STOPS), BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)
    ] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=STOPS)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    new: Tokens = Field(alias="max_new_tokens")
    seed: Seed | None = None

    def sampling(self, ends: Sequence[int]) -> Sampling:
        """Return how a request samples. ends: tokens that end a text. Raises Refused."""
        stops = dict.fromkeys((*(() if self.ignore_eos else ends), *self.stop_token_ids))
        base = Sampling(max_new_tokens=self.new, eos_token_id=tuple(stops), stop_strings=tuple(self.stop))
        if self.temperature > 0:
            return replace(
                base, do_sample=True, temperature=self.temperature, top_k=max(0, self.top_k), top_p=self.top_p,
                seed=self.seed or 0, num_return_sequences=self.n,
            )  # fmt: skip
        has = {"top_p": self.top_p != 1, "top_k": self.top_k > 1, "n": self.n > 1, "seed": self.seed is not None}
        for key in filter(has.get, has):
            raise Refused(400, f"{key}: has no effect with temperature=0", key)
        return base


class SamplingParams(Draws):
    """`sampling_params` of SGLang."""

    new: Tokens = Field(128, alias="max_new_tokens")
    seed: Seed | None = Field(None, alias="sampling_seed")


class Completes(Body):
    """What the routes that complete prompts share."""

    rid: str | list[str] | None = None
    stream: bool = False
    bits: bool = False

    @property
    def first(self) -> int | None:
        """The first token of prompts whose log-probability is asked for; None: none is."""
        start = getattr(self, "logprob_start_len", -1)
        return start if start >= 0 else None


class Generate(Completes):
    """/generate of SGLang."""

    input_ids: list[Any] | None = None
    text: str | list[str] | None = None
    sampling_params: Any = {}
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1


class OpenAI(Completes, Draws):
    """What OpenAI's routes share, with vLLM's keys for token ids, which NeMo Gym sends."""

    model: str | None = None
    new: Tokens = Field(16, alias="max_tokens")
    stream_options: dict[Literal["include_usage"], bool] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class Completions(OpenAI):
    """/v1/completions of OpenAI."""

    prompt: Any = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class Chat(OpenAI):
    """/v1/chat/completions of OpenAI."""

    messages: list[Any]
    new: Tokens = Field(1024, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: bool = False


class Update(Body):
    """/update_weights_from_disk of SGLang."""

    model_path: str
    step: Annotated[int, Field(ge=0, lt=1 << 40)] | None = None
    abort_all_requests: bool = False


class Pause(Body):
    """/pause_generation of SGLang."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(Body):
    """/abort_request of SGLang."""

    rid: str | None = None
    abort_all: bool = False


IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")  # of a message that was sampled
# Keys of a row of `tpi score`, whose values data/sequences.py reads.
ROW = (
    *("id", "tokens", "attention_mask", "cu_seqlens", "text", "prompt", "response", "messages", "prompt_token_ids"),
    *("token_ids", "prompt_length"),
)


def names(kind: type[Body]) -> list[str]:
    """Return the keys that have an effect."""
    return [*kind.model_json_schema()["properties"]]


def checked[B: Body](kind: type[B], body: Any, within: str = "") -> B:
    """Return a body. Raises Refused that names wrong keys."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for one in error.errors(include_url=False, include_input=False, include_context=False):
            key, text = str((*one["loc"], "body")[0]), one["msg"].removeprefix("Value error, ")
            if one["type"] == "extra_forbidden" and one["loc"] == (key,):
                idle = f"has no effect here; leave it out, or {' or '.join(map(json.dumps, IDLE.get(key, ())))}"
                text = idle if key in IDLE else f"no such key{nearest(key, names(kind))}"
            problems.setdefault(f"{within}{key}", f"{text[0].lower()}{text[1:]}")
        lines = [f"{key}: {text}" for key, text in problems.items()]
        raise Refused(400, "\n".join(lines[:SHOWN]), next(iter(problems))) from None


@dataclass(frozen=True)
class Asked:
    """What a body asks for, whichever its route. requests, draws: of each of its prompts. several: they were a list."""

    body: Completes
    requests: list[Request]
    draws: list[Draws]
    several: bool


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

    def asked(self, kind: type[Completes], value: Any) -> Asked:
        """Return what the body of a route asks for. Raises Refused."""
        body = checked(kind, value)
        source, key = self._source(body)
        several = isinstance(source, list) and bool(source) and isinstance(source[0], list | str)
        prompts = [self._tokens(one, key) for one in (source if several else [source])]
        given = body.sampling_params if isinstance(body, Generate) else body
        each = given if isinstance(given, list) else [given] * len(prompts)
        if len(each) != len(prompts):
            raise Refused(400, f"sampling_params: {len(each)} for {len(prompts)} prompts", "sampling_params")
        draws = [one if isinstance(one, Draws) else checked(SamplingParams, one, "sampling_params.") for one in each]
        seeded = all(one.temperature == 0 or one.seed is not None for one in draws)
        rows = zip(_names(body.rid, len(prompts), seeded=seeded), prompts, draws, strict=True)
        found = [Request(name, tuple(tokens), one.sampling(self.ends)) for name, tokens, one in rows]
        for request in found:
            if problems := [*requests.unfit(request, self.vocabulary, self.longest, self.codec is not None)]:
                raise Refused(400, listed(problems))
        return Asked(body, found, draws, several)

    def _source(self, body: Any) -> tuple[Any, str]:
        """Return the prompt or the list of them, and its key. Raises Refused."""
        if isinstance(body, Generate):
            if (body.input_ids is None) == (body.text is None):
                raise Refused(400, "input_ids, text: a request has one of both", "input_ids")
            if body.first is not None and (body.stream or not body.return_logprob):
                text = "has no effect without return_logprob, and with stream; /score scores a prompt"
                raise Refused(400, f"logprob_start_len: {text}", "logprob_start_len")
            return (body.text, "text") if body.input_ids is None else (body.input_ids, "input_ids")
        if body.model is not None and body.model not in self.names:
            raise Refused(404, f"model: there is no {body.model!r:.80}; the server has {self.names[0]}", "model")
        if body.stream_options is not None and not body.stream:
            raise Refused(400, "stream_options: has no effect without stream", "stream_options")
        return (self._conversation(body.messages), "messages") if isinstance(body, Chat) else (body.prompt, "prompt")

    def score(self, body: Mapping[str, Any]) -> list[sequences.Sequence]:
        """Return the sequences of a body of /score. Raises Refused."""
        rows = body.get("sequences", [body])
        if "sequences" in body and (len(body) > 1 or not isinstance(rows, list)):
            raise Refused(400, "sequences: must be a list of rows, and no other key stands beside it", "sequences")
        found: list[sequences.Sequence] = []
        for number, row in enumerate(rows, 1):
            unknown = [key for key in row if key not in ROW] if isinstance(row, dict) else ["sequences"]
            if unknown:
                raise Refused(400, f"{unknown[0]}: row {number} is no object with keys of {', '.join(ROW)}", unknown[0])
            try:
                found += sequences.parse(json.dumps(row).encode(), number, self.vocabulary, self.codec)
            except ValueError as error:
                raise Refused(400, f"row {number}: {error}", "sequences") from error
        if (count := sum(len(each.tokens) for each in found)) > SCORED:
            raise Refused(413, f"{count} tokens are more than the {SCORED} that a request may score", "sequences")
        if not found or max(len(each.tokens) for each in found) > self.longest:
            raise Refused(400, f"sequences: at least one, each of at most {self.longest} tokens", "sequences")
        return found

    def _tokens(self, value: Any, key: str) -> list[int]:
        try:
            return sequences.ids(value, key, self.codec.encode if self.codec else None, special=True)
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
                raise ValueError("messages have token ids, and the chat template ends answers by no end token")
            return sampled[: -1 if sampled[-1:] and sampled[-1] in self.ends else None] + whole[end:]
        except ValueError as error:
            raise Refused(400, str(error), "messages") from error


def _names(rid: str | list[str] | None, count: int, *, seeded: bool) -> list[str]:
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
