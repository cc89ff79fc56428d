# SPDX-License-Identifier: Apache-2.0
"""Answers of the routes: what SGLang and OpenAI name the tokens and log-probabilities of a request."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.features.rollouts.requests import LENGTH
from tp_invariant_recipes.features.serve.backend import Open, Sample
from tp_invariant_recipes.features.serve.messages import ABORT


def decimals(log_probabilities: Sequence[float]) -> list[float]:
    """Return numbers whose JSON is the shortest that gives back the fp32."""
    return [float(text) for text in np.array(log_probabilities, np.float32).astype(str)]


def hexadecimal(log_probabilities: Sequence[float]) -> list[str]:
    """Return the bits of fp32 numbers."""
    return [f"{bits:08x}" for bits in np.array(log_probabilities, np.float32).view(np.uint32).tolist()]


def text_of(codec: Codec, tokens: Sequence[int], given: Mapping[str, Any]) -> str:
    """Return the text of tokens. Special ones are left out, unless skip_special_tokens is false."""
    if codec.loaded is not None and given.get("skip_special_tokens", True):
        return codec.loaded.decode([*tokens], skip_special_tokens=True)
    return codec.decode([*tokens])


def _stopped(text: str, opened: Open, given: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text up to the first stop string in it, and this string."""
    found = [(text.find(stop), stop) for stop in opened.work.request.sampling.stop_strings if stop in text]
    if not found:
        return text, None
    at, stop = min(found)
    return (text if given.get("no_stop_trim") else text[:at]), stop


def _finish(sample: Sample, opened: Open, stop: str | None) -> dict[str, Any] | None:
    if sample.reason is None:
        return None
    if sample.reason == ABORT:
        return {"type": ABORT, "message": "aborted by a request to do so"}
    if sample.reason == LENGTH:
        return {"type": LENGTH, "length": len(sample.tokens)}
    last = sample.tokens[-1]
    return {"type": sample.reason, "matched": last if last in opened.work.request.sampling.eos_token_id else stop}


def _versions(sample: Sample, now: str) -> dict[str, Any]:
    runs = sample.versions or ((now, len(sample.tokens)),)
    listed = [{"weight_version": version, "tokens": count} for version, count in runs]
    return {"weight_version": runs[-1][0], "weight_versions": listed}


class Sglang:
    """Answers of /generate. given: the other values of the body."""

    def __init__(self, codec: Codec | None, given: Mapping[str, Any]) -> None:
        self.codec, self.given, self.begun = codec, given, time.monotonic()

    def __call__(self, opened: Open, number: int, version: str) -> dict[str, Any]:
        """Return a sample as it is now."""
        sample, request = opened.samples[number], opened.work.request
        text, stop = "", None
        if self.codec is not None:
            text, stop = _stopped(text_of(self.codec, sample.tokens, self.given), opened, self.given)
        meta: dict[str, Any] = {
            "id": request.id, "sample": number, "finish_reason": _finish(sample, opened, stop),
            "prompt_tokens": len(request.tokens), "completion_tokens": len(sample.tokens), "cached_tokens": 0,
            "e2e_latency": round(time.monotonic() - self.begun, 6), **_versions(sample, version),
        }  # fmt: skip
        if self.given.get("return_logprob"):
            meta |= self._scored("output", sample.tokens, sample.log_probabilities)
        if opened.scores is not None:
            line, meta["input_weight_version"] = opened.scores
            row = json.loads(line) if line else {"token_ids": [], "logprobs": []}
            first = opened.work.first or 0
            tokens = request.tokens[first:]
            unscored = len(tokens) - len(row["logprobs"])  # of the first token, which nothing predicts
            meta |= self._scored("input", tokens, row["logprobs"], unscored)
        return {"text": text, "output_ids": sample.tokens, "meta_info": meta}

    def _scored(
        self, which: str, tokens: Sequence[int], log_probabilities: Sequence[float], unscored: int = 0
    ) -> dict[str, Any]:
        values = [*[None] * unscored, *decimals(log_probabilities)]
        texts: Sequence[str | None] = [None] * len(tokens)
        if self.given.get("return_text_in_logprobs") and self.codec is not None:
            texts = [self.codec.decode([token]) for token in tokens]
        scored = {f"{which}_token_logprobs": [*zip(values, tokens, texts, strict=True)]}
        if self.given.get("bits"):
            scored[f"{which}_token_bits"] = [*[None] * unscored, *hexadecimal(log_probabilities)]  # type: ignore[list-item]
        return scored


class OpenAI:
    """Answers of /v1/completions and /v1/chat/completions. given: the other values of the body."""

    def __init__(self, codec: Codec | None, given: Mapping[str, Any], model: str, *, chat: bool) -> None:
        self.codec, self.given, self.chat = codec, given, chat
        kind = "chat.completion" if chat else "text_completion"
        self.head: dict[str, Any] = {"object": kind, "created": int(time.time()), "model": given.get("model", model)}

    def whole(self, opened: Sequence[Open], version: str) -> dict[str, Any]:
        """Return the answer of a request that has ended."""
        pairs = [(each, number) for each in opened for number in range(len(each.samples))]
        choices = [self.choice(*pair, index, version) for index, pair in enumerate(pairs)]
        answer = {"id": self._id(opened), **self.head, "choices": choices, "usage": self.usage(opened)}
        if self.given.get("return_token_ids") and self.chat:
            answer["prompt_token_ids"] = opened[0].work.request.tokens
        return answer | {"weight_version": version}

    def _id(self, opened: Sequence[Open]) -> str:
        return opened[0].work.request.id

    def usage(self, opened: Sequence[Open]) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt = sum(len(each.work.request.tokens) for each in opened)
        new = sum(len(sample.tokens) for each in opened for sample in each.samples)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def choice(
        self, opened: Open, number: int, index: int, version: str, start: int = 0, shown: int = 0, *, part: bool = False
    ) -> dict[str, Any]:
        """Return a choice. start, shown: tokens and characters that parts before had; part: of a stream."""
        sample = opened.samples[number]
        text, stop = "", None
        if self.codec is not None:
            text, stop = _stopped(text_of(self.codec, sample.tokens, self.given), opened, self.given)
        tokens, values = sample.tokens[start:], decimals(sample.log_probabilities[start:])
        finish = _finish(sample, opened, stop)
        choice: dict[str, Any] = {
            "index": index, "finish_reason": finish and finish["type"], "logprobs": None, **_versions(sample, version),
        }  # fmt: skip
        ids = bool(self.given.get("return_token_ids"))
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text[shown:]}
            if ids and not part:
                prompt = opened.work.request.tokens
                message |= {
                    "prompt_token_ids": prompt, "generation_token_ids": tokens, "generation_log_probs": values,
                }  # fmt: skip
            choice["delta" if part else "message"] = message
        else:
            choice["text"] = text[shown:]
        if ids:
            choice["token_ids"] = tokens
            if not self.chat:
                choice["prompt_token_ids"] = opened.work.request.tokens
        if self.given.get("logprobs") not in (None, False):
            choice["logprobs"] = self._logprobs(tokens, values)
            if self.given.get("bits"):
                choice["logprobs"]["bits"] = hexadecimal(sample.log_probabilities[start:])
        return choice

    def _logprobs(self, tokens: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        named = self.given.get("return_tokens_as_token_ids") or self.codec is None
        texts = [f"token_id:{t}" if named or self.codec is None else self.codec.decode([t]) for t in tokens]
        if self.chat:
            rows = zip(texts, values, strict=True)
            content = [
                {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []} for text, value in rows
            ]
            return {"content": content}
        offsets = [0, *np.cumsum([len(text) for text in texts]).tolist()][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
