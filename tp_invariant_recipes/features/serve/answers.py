# SPDX-License-Identifier: Apache-2.0
"""Answers of the routes: what SGLang and OpenAI name the tokens and log-probabilities of a request."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.features.rollouts.requests import LENGTH
from tp_invariant_recipes.features.serve.backend import Open, Sample
from tp_invariant_recipes.features.serve.bodies import Asked, Chat, Draws
from tp_invariant_recipes.features.serve.messages import ABORT

Part = dict[str, Any]
HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of a part of a character


def hexadecimal(log_probabilities: Sequence[float]) -> list[str]:
    """Return the bits of fp32 numbers."""
    return [f"{bits:08x}" for bits in np.array(log_probabilities, np.float32).view(np.uint32).tolist()]


class Answer:
    """The samples of a body's requests, in order, as they are now. codec: None: there is no tokenizer.

    sent: what a stream has sent of each: its tokens, characters of its text, and why it has ended.
    """

    def __init__(self, codec: Codec | None, asked: Asked, opened: Sequence[Open], model: str) -> None:
        self.codec, self.asked, self.opened, self.model = codec, asked, opened, model
        pairs = zip(opened, asked.draws, strict=True)
        self.samples = [(each, sample, draws) for each, draws in pairs for sample in each.samples]
        self.sent: list[tuple[int, int, str | None]] = [(0, 0, None)] * len(self.samples)
        self.body: Any = asked.body

    def changed(self) -> Iterator[Part]:
        """Yield what a stream has to send of the samples that have changed."""
        for index, (_, sample, _) in enumerate(self.samples):
            tokens, shown, reason = self.sent[index]
            if (len(sample.tokens), sample.reason) != (tokens, reason):
                part, shown = self.part(index, tokens, shown)
                self.sent[index] = len(sample.tokens), shown, sample.reason
                yield part

    def whole(self) -> Part | list[Part]:
        """Return the answer of a request that has ended."""
        raise NotImplementedError

    def part(self, index: int, tokens: int = 0, shown: int = 0) -> tuple[Part, int]:
        """Return what is sent of a sample and the length of its text. tokens, shown: what was sent of it before."""
        raise NotImplementedError

    def last(self) -> list[Part]:
        """Return what ends a stream."""
        return []

    def text(self, opened: Open, sample: Sample, draws: Draws) -> tuple[str, Part | None]:
        """Return a sample's text, up to a stop string, and why it has ended; None: it has not.

        The text of one that has not ended lacks an end that may become another character, or a stop string.
        """
        sampling, codec = opened.request.sampling, self.codec
        stops, skips = sampling.stop_strings, codec is not None and codec.loaded and draws.skip_special_tokens
        text = codec.decode(sample.tokens) if codec is not None and (stops or not skips) else ""
        matched: Any = min(((text.find(stop), stop) for stop in stops if stop in text), default=(0, None))[1]
        if codec is not None and skips:
            text = codec.loaded.decode(sample.tokens, skip_special_tokens=True)
        if sample.reason is None:
            text = text.rstrip(HALF)
            longest = 0 if draws.no_stop_trim else max(map(len, stops), default=0)
            ends = range(max(0, len(text) - longest), len(text))
            return text[: next((n for n in ends if any(stop.startswith(text[n:]) for stop in stops)), None)], None
        if sample.reason == ABORT:
            return text, {"type": ABORT, "message": "aborted by a request to do so"}
        if sample.reason == LENGTH:
            return text, {"type": LENGTH, "length": len(sample.tokens)}
        if matched is not None and not draws.no_stop_trim:
            text = text.partition(matched)[0]
        last = sample.tokens[-1]
        return text, {"type": sample.reason, "matched": last if last in sampling.eos_token_id else matched}


def _versions(sample: Sample) -> Part:
    listed = [{"weight_version": version, "tokens": count} for version, count in sample.versions]
    return {"weight_version": sample.versions[-1][0], "weight_versions": listed}


class Sglang(Answer):
    """Answers of /generate; the text and the tokens of a stream grow."""

    def whole(self) -> Part | list[Part]:
        """Return the answer of a request that has ended."""
        parts = [self.part(index)[0] for index in range(len(self.samples))]
        return parts if self.asked.several or len(parts) > 1 else parts[0]

    def part(self, index: int, tokens: int = 0, shown: int = 0) -> tuple[Part, int]:
        """Return a sample."""
        opened, sample, draws = self.samples[index]
        (text, finish), prompt = self.text(opened, sample, draws), opened.request.tokens
        meta: Part = {
            "id": opened.request.id, "sample": sample.number, "finish_reason": finish, "prompt_tokens": len(prompt),
            "completion_tokens": len(sample.tokens), "cached_tokens": 0, **_versions(sample),
        }  # fmt: skip
        if self.body.return_logprob:
            meta |= self._scored("output", sample.tokens, sample.log_probabilities)
        if opened.scores is not None:
            line, meta["input_weight_version"] = opened.scores
            meta |= self._scored("input", prompt[self.body.first :], json.loads(line)["logprobs"] if line else [])
        listed = self.body.stream and (self.asked.several or len(self.samples) > 1)
        part = {"text": text, "output_ids": sample.tokens, "meta_info": meta}
        return part | ({"index": index} if listed else {}), 0

    def _scored(self, which: str, tokens: Sequence[int], log_probabilities: Sequence[float]) -> Part:
        """Return tokens with their log-probabilities; nothing predicts the first token of a prompt."""
        none = [None] * (len(tokens) - len(log_probabilities))
        rows = [(value, token, None) for value, token in zip([*none, *log_probabilities], tokens, strict=True)]
        bits = {f"{which}_token_bits": [*none, *hexadecimal(log_probabilities)]} if self.body.bits else {}
        return {f"{which}_token_logprobs": rows, **bits}


class OpenAI(Answer):
    """Answers of OpenAI's routes; a stream has what is new."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.chat = isinstance(self.body, Chat)
        kind = ("chat.completion.chunk" if self.body.stream else "chat.completion") if self.chat else "text_completion"
        self.head = {"id": self.opened[0].request.id, "object": kind, "created": int(time.time())}
        self.head["model"] = self.body.model or self.model

    def whole(self) -> Part:
        """Return the answer of a request that has ended."""
        choices = [self._choice(index, 0, 0)[0] for index in range(len(self.samples))]
        prompt = {"prompt_token_ids": self.opened[0].request.tokens} if self.chat and self.body.return_token_ids else {}
        answer = self.head | {"choices": choices, "usage": self._usage()} | prompt
        return answer | {"weight_version": choices[-1]["weight_version"]}

    def part(self, index: int, tokens: int = 0, shown: int = 0) -> tuple[Part, int]:
        """Return what is new of a sample."""
        choice, shown = self._choice(index, tokens, shown)
        return self.head | {"choices": [choice]}, shown

    def last(self) -> list[Part]:
        """Return the usage, where it is asked for."""
        asked = (self.body.stream_options or {}).get("include_usage")
        return [self.head | {"choices": [], "usage": self._usage()}] if asked else []

    def _usage(self) -> Part:
        prompt = sum(len(each.request.tokens) for each in self.opened)
        new = sum(len(sample.tokens) for _, sample, _ in self.samples)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _choice(self, index: int, start: int, shown: int) -> tuple[Part, int]:
        opened, sample, draws = self.samples[index]
        (text, finish), prompt = self.text(opened, sample, draws), opened.request.tokens
        tokens, values = sample.tokens[start:], sample.log_probabilities[start:]
        choice: Part = {"index": index, "finish_reason": finish and finish["type"], **_versions(sample)}
        message: Part = {"role": "assistant", "content": text[shown:]}
        if self.body.return_token_ids:
            choice |= {"token_ids": tokens} | ({} if self.chat else {"prompt_token_ids": prompt})
            message |= {"prompt_token_ids": prompt, "generation_token_ids": tokens, "generation_log_probs": values}
        key, content = ("delta" if self.body.stream else "message", message) if self.chat else ("text", text[shown:])
        choice |= {key: content, "logprobs": None}
        if self.body.logprobs is not None and self.body.logprobs is not False:  # 0: no alternatives
            bits = {"bits": hexadecimal(sample.log_probabilities[start:])} if self.body.bits else {}
            choice["logprobs"] = self._logprobs(tokens, values) | bits
        return choice, len(text)

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float]) -> Part:
        codec = None if self.body.return_tokens_as_token_ids else self.codec
        texts = [codec.decode([token]) if codec else f"token_id:{token}" for token in tokens]
        if self.chat:
            rows = zip(texts, values, strict=True)
            return {
                "content": [{"token": t, "logprob": x, "bytes": [*t.encode()], "top_logprobs": []} for t, x in rows]
            }
        offsets = [0, *np.cumsum([len(text) for text in texts]).tolist()][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
