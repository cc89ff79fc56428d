# SPDX-License-Identifier: Apache-2.0
"""What rollouts are asked for and what they return. Names and defaults of `Sampling` are those of transformers'
`generate`.

A completion depends on the weights, the request's tokens and `Sampling`, and the request's id alone: on no layout,
batch, order, chunk or machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any

from tp_invariant_recipes.data.sequences import outside
from tp_invariant_recipes.errors import refuse

STOP, LENGTH = "stop", "length"  # finish reasons
SEEDS = 1 << 63
SAMPLES = 1 << 31  # of a request; also the most new tokens
SHOWN = 5  # problems of one message
OF_DRAWS = ("temperature", "top_k", "top_p", "seed", "num_return_sequences")


# Fields of Sampling that are whole numbers: name, the least, and what they stay below.
WHOLE = (
    ("max_new_tokens", 1, SAMPLES), ("top_k", 0, SAMPLES), ("num_return_sequences", 1, SAMPLES), ("seed", 0, SEEDS),
)  # fmt: skip


def is_temperature(value: Any) -> bool:
    """Whether logits may be divided by it: fp32 has room for the results."""
    return type(value) in (int, float) and 1e-6 <= value <= 1e6


def is_share(value: Any) -> bool:
    """Whether it is a part of the probability."""
    return type(value) in (int, float) and 0 < value <= 1


def are_tokens(ids: Any) -> bool:
    """Whether these are ids of tokens."""
    return all(type(token) is int and token >= 0 for token in ids)


# The others: name, whether a value is right, and what it must be.
VALUES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("do_sample", lambda value: type(value) is bool, "must be true or false"),
    ("temperature", is_temperature, "must be from 1e-6 to 1e6; do_sample=false takes the most probable token"),
    ("top_p", is_share, "must be above 0 and at most 1"),
    ("eos_token_id", are_tokens, "must be token ids"),
    ("stop_strings", lambda texts: all(isinstance(t, str) and t for t in texts), "must be texts that are not empty"),
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the completions of a request are sampled. Names and defaults are those of transformers' `generate`.

    Args:
        max_new_tokens: The most tokens of a completion.
        do_sample: Whether to draw; False: the most probable token, the least id of equals.
        temperature: Divides the log-probabilities of draws. Those that are returned are the model's.
        top_k: Draw from so many most probable tokens; 0: from all.
        top_p: Draw from the most probable tokens that have this probability together; 1.0: from all.
        num_return_sequences: Completions of a request, numbered from 0.
        seed: The seed of all draws of a request.
        eos_token_id: Token ids that end a completion, and are its last tokens.
        stop_strings: Texts that end a completion.

    Raises:
        TpiError: A value has no meaning, or no effect.
    """

    max_new_tokens: int = 20
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    num_return_sequences: int = 1
    seed: int = 0
    eos_token_id: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make tuples of a single id or string and of lists; check all."""
        for name, kind in (("eos_token_id", int), ("stop_strings", str)):
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, kind) else tuple(value)
            object.__setattr__(self, name, value)
        refuse([f"{name}={getattr(self, name)!r}: {why}" for name, why in self._problems()])
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name, least, most in WHOLE:
            value = getattr(self, name)
            if type(value) is not int or not least <= value < most:
                yield name, f"must be a whole number, at least {least} and below {most}"
        yield from ((name, text) for name, accepts, text in VALUES if not accepts(getattr(self, name)))
        if self.do_sample is False:
            for field in fields(self):
                if field.name in OF_DRAWS and getattr(self, field.name) != field.default:
                    yield field.name, "has no effect without draws; do_sample=true, or leave it out"

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """What draws read of it."""
        return self.do_sample, self.temperature, self.top_k, self.top_p

    @property
    def limits(self) -> int | None:
        """The most tokens that top-k leaves, 0 without it; None: all tokens may be drawn."""
        return self.top_k if self.do_sample and (self.top_k > 0 or self.top_p < 1) else None


@dataclass(frozen=True)
class Request:
    """A prompt to complete.

    Args:
        id: Names the request's draws, and no other request's.
        tokens: At least one token id; a list or a tensor will do.
        sampling: How the completions are sampled.

    Raises:
        TypeError: A token is no whole number.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling

    def __post_init__(self) -> None:
        """Make tokens a tuple of numbers of Python."""
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))


@dataclass(frozen=True)
class Completion:
    """A sample of a request.

    Attributes:
        request: The id of its request.
        sample: Its number, from 0 on.
        tokens: The new tokens, with what ended it. The tuples below have their length.
        log_probabilities: fp32 numbers, of the model at temperature 1.
        ranks: Each token's rank by probability, from 1 on.
        finish_reason: "stop" or "length".
        digests: Of all log-probabilities of the vocabulary, 64 bits a token; empty: not asked for.
    """

    request: str
    sample: int
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    ranks: tuple[int, ...]
    finish_reason: str
    digests: tuple[int, ...] = ()


def finish_reason(tokens: Sequence[int], sampling: Sampling, decode: Callable[[list[int]], str] | None) -> str | None:
    """Why a completion ends with the last of these tokens; None: it continues.

    A stop string counts where it ends in the text of the last tokens, as many as the longest one has bytes, and one.
    """
    if tokens[-1] in sampling.eos_token_id:
        return STOP
    if sampling.stop_strings:
        assert decode is not None, "check() refuses stop strings without a tokenizer"
        last = 1 + max(len(text.encode()) for text in sampling.stop_strings)
        text = decode(list(tokens[-last:]))
        if any(stop in text for stop in sampling.stop_strings):
            return STOP
    return LENGTH if len(tokens) == sampling.max_new_tokens else None


def check(requests: Sequence[Request], vocabulary: int, longest: int | None, *, text: bool) -> None:
    """ConfigError that lists what no engine can complete. vocabulary: ids of the model. text: there is a tokenizer.

    longest: tokens of a prompt with its completion; None: any number.
    """
    listed: list[str] = []
    ids: set[str] = set()
    for request in requests:
        listed += [f"request {request.id}: {why}" for why in unfit(request, vocabulary, longest, text)]
        if request.id in ids:
            listed.append(f"request {request.id}: its id is there twice, and would have the same draws")
        ids.add(request.id)
        if len(listed) >= SHOWN:
            break
    refuse(listed)


def unfit(request: Request, vocabulary: int, longest: int | None, text: bool) -> Iterator[str]:
    """Yield what keeps a request from being completed."""
    sampling, tokens = request.sampling, request.tokens
    if not tokens:
        yield "an empty prompt, which predicts nothing"
    elif max(tokens) >= vocabulary or min(tokens) < 0:
        yield outside(tokens, vocabulary)
    if ends := [token for token in sampling.eos_token_id if token >= vocabulary]:
        yield f"eos_token_id {ends[0]} is outside the model's vocabulary of {vocabulary}"
    if longest is not None and len(tokens) + sampling.max_new_tokens > longest:
        yield (
            f"{len(tokens)} tokens and max_new_tokens={sampling.max_new_tokens} are more than the {longest} that "
            "positions and cache have; a shorter prompt, fewer new tokens, or a larger cache"
        )
    if sampling.stop_strings and not text:
        yield "stop_strings need a tokenizer: --tokenizer FOLDER, or byte"
