# SPDX-License-Identifier: Apache-2.0
"""Answers of the routes: what SGLang and OpenAI name the tokens and log-probabilities of a request."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.features.rollouts.requests import LENGTH
from tp_invariant_recipes.features.serve.backend import Open
from tp_invariant_recipes.features.serve.bodies import Chat, Generate, OpenAI, SamplingParams
from tp_invariant_recipes.features.serve.messages import ABORT

Part = dict[str, Any]


def decimals(log_probabilities: Sequence[float]) -> list[float]:
    """Return numbers whose JSON is the shortest that gives back the fp32."""
    return [float(text) for text in np.array(log_probabilities, np.float32).astype(str)]


def hexadecimal(log_probabilities: Sequence[float]) -> list[str]:
    """Return the bits of fp32 numbers."""
    return [f"{bits:08x}" for bits in np.array(log_probabilities, np.float32).view(np.uint32).tolist()]


def _text(codec: Codec | None, opened: Open, number: int, *, special: bool, trim: bool) -> tuple[str, Part | None]:
    """Return a sample's text, up to the first stop string, and why it has ended; None: it has not.

    special: whether the text has special tokens. trim: whether it lacks the stop string.
    """
    sample, sampling = opened.samples[number], opened.work.request.sampling
    text = ""
    if codec is not None and codec.loaded is not None:
        text = codec.loaded.decode(sample.tokens, skip_special_tokens=not special)
    elif codec is not None:
        text = codec.decode(sample.tokens)
    matched: Any = min(((text.find(stop), stop) for stop in sampling.stop_strings if stop in text), default=None)
    if matched is not None and trim:
        text = text[: matched[0]]
    if sample.reason == ABORT:
        return text, {"type": ABORT, "message": "aborted by a request to do so"}
    if sample.reason == LENGTH:
        return text, {"type": LENGTH, "length": len(sample.tokens)}
    if sample.reason is None:
        return text, None
    last = sample.tokens[-1]
    return text, {"type": sample.reason, "matched": last if last in sampling.eos_token_id else matched and matched[1]}


def _versions(opened: Open, number: int) -> Part:
    sample = opened.samples[number]
    runs = sample.versions or ((opened.version, len(sample.tokens)),)
    listed = [{"weight_version": version, "tokens": count} for version, count in runs]
    return {"weight_version": runs[-1][0], "weight_versions": listed}


class Sglang:
    """Answers of /generate. given, each: the body, and how its prompts sample."""

    def __init__(self, codec: Codec | None, given: Generate, each: Sequence[SamplingParams]) -> None:
        self.codec, self.given, self.each, self.begun = codec, given, each, time.monotonic()
        self.sent: dict[int, list[tuple[int, str | None]]] = {}

    def changed(self, opened: Open, place: int, *, several: bool) -> list[Part]:
        """Return what a stream has to send of a prompt: the samples that have changed."""
        before = self.sent.get(place) or [(0, None)] * len(opened.samples)
        self.sent[place] = [(len(sample.tokens), sample.reason) for sample in opened.samples]
        parts = self.parts(opened, place, several=several)
        return [part for part, old, new in zip(parts, before, self.sent[place], strict=True) if old != new]

    def parts(self, opened: Open, place: int, *, several: bool) -> list[Part]:
        """Return the samples of a prompt as they are now. place: of the prompt in the body."""
        parts = [self._sample(opened, number, self.each[place]) for number in range(len(opened.samples))]
        first = place * len(parts)
        return [part | ({"index": first + n} if several else {}) for n, part in enumerate(parts)]

    def _sample(self, opened: Open, number: int, params: SamplingParams) -> Part:
        sample, request = opened.samples[number], opened.work.request
        special, trim = not params.skip_special_tokens, not params.no_stop_trim
        text, finish = _text(self.codec, opened, number, special=special, trim=trim)
        meta: Part = {
            "id": request.id, "sample": number, "finish_reason": finish, "prompt_tokens": len(request.tokens),
            "completion_tokens": len(sample.tokens), "cached_tokens": 0,
            "e2e_latency": round(time.monotonic() - self.begun, 6), **_versions(opened, number),
        }  # fmt: skip
        if self.given.return_logprob:
            meta |= self._scored("output", sample.tokens, sample.log_probabilities)
        if opened.scores is not None:
            line, meta["input_weight_version"] = opened.scores
            values = json.loads(line)["logprobs"] if line else []
            meta |= self._scored("input", request.tokens[opened.work.first :], values)
        return {"text": text, "output_ids": sample.tokens, "meta_info": meta}

    def _scored(self, which: str, tokens: Sequence[int], log_probabilities: Sequence[float]) -> Part:
        """Return tokens with their log-probabilities; nothing predicts the first token of a prompt."""
        none = [None] * (len(tokens) - len(log_probabilities))
        texts: Sequence[str | None] = [None] * len(tokens)
        if self.given.return_text_in_logprobs and self.codec is not None:
            texts = [self.codec.decode([token]) for token in tokens]
        rows = [*zip([*none, *decimals(log_probabilities)], tokens, texts, strict=True)]
        bits = {f"{which}_token_bits": [*none, *hexadecimal(log_probabilities)]} if self.given.bits else {}
        return {f"{which}_token_logprobs": rows, **bits}


@dataclass
class Choices:
    """Answers of OpenAI's routes. given: the body. sent: of a stream, each sample's tokens and characters so far."""

    codec: Codec | None
    given: OpenAI
    model: str
    opened: Sequence[Open]
    sent: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Note what each answer begins with."""
        self.chat = isinstance(self.given, Chat)
        kind = "chat.completion" if self.chat else "text_completion"
        kind += ".chunk" if self.chat and self.given.stream else ""
        self.head = {"id": self.opened[0].work.request.id, "object": kind, "created": self.created}
        self.head |= {"model": self.given.model or self.model}

    def whole(self) -> Part:
        """Return the answer of a request that has ended."""
        pairs = [(each, number) for each in self.opened for number in range(len(each.samples))]
        choices = [self._choice(*pair, index, 0, 0)[0] for index, pair in enumerate(pairs)]
        answer = {**self.head, "choices": choices, "usage": self._usage()}
        if self.given.return_token_ids and self.chat:
            answer["prompt_token_ids"] = self.opened[0].work.request.tokens
        return answer | {"weight_version": choices[-1]["weight_version"]}

    def parts(self, opened: Open, place: int) -> list[Part]:
        """Return what a stream has to send of a prompt."""
        found = []
        for number, sample in enumerate(opened.samples):
            start, shown = self.sent.get((opened.key, number), (0, 0))
            if start < 0 or (len(sample.tokens) == start and sample.reason is None):
                continue
            index = place * len(opened.samples) + number
            choice, length = self._choice(opened, number, index, start, shown)
            if choice is not None:
                self.sent[opened.key, number] = (-1, 0) if sample.reason else (len(sample.tokens), length)
                found.append(self.head | {"choices": [choice]})
        return found

    def last(self) -> list[Part]:
        """Return what ends a stream."""
        options = self.given.stream_options
        return [self.head | {"choices": [], "usage": self._usage()}] if options and options.include_usage else []

    def _usage(self) -> Part:
        prompt = sum(len(each.work.request.tokens) for each in self.opened)
        new = sum(len(sample.tokens) for each in self.opened for sample in each.samples)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _choice(self, opened: Open, number: int, index: int, start: int, shown: int) -> tuple[Any, int]:
        """Return a choice and the length of its text. start, shown: tokens and characters that were sent before.

        It is None where the text of a stream ends in half a character, whose other half comes.
        """
        sample, prompt = opened.samples[number], opened.work.request.tokens
        text, finish = _text(self.codec, opened, number, special=not self.given.skip_special_tokens, trim=True)
        if self.given.stream and finish is None and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return None, 0
        tokens, values = sample.tokens[start:], decimals(sample.log_probabilities[start:])
        choice: Part = {"index": index, "finish_reason": finish and finish["type"], **_versions(opened, number)}
        message: Part = {"role": "assistant", "content": text[shown:]}
        if self.given.return_token_ids:
            choice["token_ids"] = tokens
            if not self.chat:
                choice["prompt_token_ids"] = prompt
            message |= {"prompt_token_ids": prompt, "generation_token_ids": tokens, "generation_log_probs": values}
        if self.chat:
            choice["delta" if self.given.stream else "message"] = message
        else:
            choice["text"] = text[shown:]
        choice["logprobs"] = None
        asked = getattr(self.given, "logprobs", None)
        if asked is not None and asked is not False:  # 0: no alternatives
            choice["logprobs"] = self._logprobs(tokens, values)
            if self.given.bits:
                choice["logprobs"]["bits"] = hexadecimal(sample.log_probabilities[start:])
        return choice, len(text)

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float]) -> Part:
        name: Callable[[int], str] = "token_id:{}".format
        if self.codec is not None and not self.given.return_tokens_as_token_ids:
            name = partial(_decoded, self.codec)
        texts = [*map(name, tokens)]
        if self.chat:
            rows = zip(texts, values, strict=True)
            return {
                "content": [{"token": t, "logprob": x, "bytes": [*t.encode()], "top_logprobs": []} for t, x in rows]
            }
        offsets = [0, *np.cumsum([len(text) for text in texts]).tolist()][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _decoded(codec: Codec, token: int) -> str:
    return codec.decode([token])
