# SPDX-License-Identifier: Apache-2.0
"""Sequences to score: JSONL, one object a line, read as a stream.

    {"tokens": [1, 2, 3]}                     token ids; with "attention_mask", those where it is 0 are padding
    {"tokens": […], "cu_seqlens": [0, 5, 9]}  sequences packed into one row, as Megatron's PackedSeqParams
    {"text": "…"}                             tokenized, with the special tokens that the tokenizer adds
    {"prompt": …, "response": …}              texts or token ids; only the response's tokens are scored
    {"messages": [{"role": …}, …]}            a conversation, by the tokenizer's chat template
    {"messages": […], "response": …}          the same with the start of an answer, as `tpi generate` begins it
    {"prompt_token_ids": …, "token_ids": …}   a line of `tpi generate`: only what was generated is scored

"prompt_length": N beside tokens leaves the first N tokens unscored; "id" names a sequence, else its line does.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tp_invariant_recipes.data.tokenizer import BYTE, identify, of_folder
from tp_invariant_recipes.errors import ConfigError, listed, reason
from tp_invariant_recipes.reading import TOKENS, parse_object, read_lines

TALK = {"conversation", "conversations"}  # keys of conversations in another form than a chat template reads
SHOWN = 5  # problems that one message lists
Encode = Callable[[str, bool], list[int]]  # a text, and whether special tokens are added to it


@dataclass(frozen=True)
class Sequence:
    """Tokens to score. first: the position of the first scored one; at position 0 nothing predicts a token."""

    id: str | int
    tokens: list[int]
    first: int


@dataclass(frozen=True)
class Surveyed:
    """A file that was read once. sha256: hex, of its bytes. sequences, longest: their number, and tokens of one.

    scored: tokens of all that have a score.
    """

    sha256: str
    sequences: int
    longest: int
    scored: int


class Codec(NamedTuple):
    """A tokenizer's functions, its digest, and transformers' tokenizer; None: bytes have none.

    template: messages, and whether an answer begins after them, to text; None: there is no chat template.
    """

    encode: Encode
    decode: Callable[[list[int]], str]
    digest: str
    loaded: Any = None
    template: Callable[[Any, bool], str] | None = None


# Takes whatever some tokenizer might take.
ANY = Codec(lambda text, _: [0] * (len(text) + 1), lambda _: "", "", None, lambda *_: " ")


def tokenizer(where: str) -> Codec:
    """Load a tokenizer: "byte" or a Hugging Face folder. Raises DataError."""
    identity = identify(where)
    if identity.folder is None:
        text_of = lambda ids: bytes(i % 256 for i in ids).decode(errors="replace")  # noqa: E731
        return Codec(lambda text, _: [*text.encode()], text_of, BYTE)
    loaded = of_folder(identity.folder)

    def encode(text: str, special: bool) -> list[int]:
        return loaded(text, add_special_tokens=special, verbose=False)["input_ids"]

    def template(messages: Any, answer: bool) -> str:
        return loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)

    return Codec(encode, loaded.decode, identity.sha256, loaded, template if loaded.chat_template else None)


def survey(file: Path, vocabulary: int, codec: Codec | None) -> Surveyed:
    """Read and check the whole file. Raises ConfigError that lists lines and what is wrong with them."""
    digest, count, longest, scored = hashlib.sha256(), 0, 0, 0
    problems: list[str] = []
    try:
        for number, line in _lines(file):
            digest.update(line)
            try:
                for sequence in parse(line, number, vocabulary, codec):
                    count, longest = count + 1, max(longest, len(sequence.tokens))
                    scored += len(sequence.tokens) - sequence.first
            except ValueError as error:
                problems.append(f"{file}, line {number}: {reason(error)}")
                if len(problems) == SHOWN:
                    break
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    if problems or not count:
        problems = problems or [f"{file}: no sequences in it"]
        raise ConfigError(listed(problems), problems)
    return Surveyed(digest.hexdigest(), count, longest, scored)


def sequences(file: Path, vocabulary: int, codec: Codec | None) -> Iterator[Sequence]:
    """Yield the sequences of a file that `survey` has passed."""
    for number, line in _lines(file):
        yield from parse(line, number, vocabulary, codec)


def parse(line: bytes, number: int, vocabulary: int, codec: Codec | None) -> list[Sequence]:
    """Return the sequences of a line; several where they are packed. Raises ValueError.

    number: the line's, from 1 on. vocabulary: ids of the model. codec: None: there is no tokenizer.
    """
    row = parse_object(line, constants=True, most=TOKENS)
    sequences = _of_row(row, check_id(row.get("id", number)), codec)
    for sequence in sequences:
        if sequence.first >= len(sequence.tokens):
            raise ValueError("no token to score: a sequence has at least two, and one after its prompt")
        if max(sequence.tokens) >= vocabulary or min(sequence.tokens) < 0:
            raise ValueError(outside(sequence.tokens, vocabulary))
    return sequences


def _of_row(row: dict[str, Any], name: str | int, codec: Codec | None) -> list[Sequence]:
    encode = codec.encode if codec else None
    if "messages" in row and "response" not in row:
        return [Sequence(name, conversation(codec, row["messages"], answer=False), 1)]
    if "messages" in row:
        prompt = conversation(codec, row["messages"], answer=True)
        return [Sequence(name, prompt + ids(row["response"], "response", encode), max(1, len(prompt)))]
    if "prompt" in row and "response" in row:
        prompt = ids(row["prompt"], "prompt", encode, special=True)
        return [Sequence(name, prompt + ids(row["response"], "response", encode), max(1, len(prompt)))]
    if "prompt_token_ids" in row and "token_ids" in row:
        prompt = ids(row["prompt_token_ids"], "prompt_token_ids", None)
        return [Sequence(name, prompt + ids(row["token_ids"], "token_ids", None), max(1, len(prompt)))]
    if "text" in row:
        return [Sequence(name, ids(row["text"], "text", encode, special=True), 1)]
    if "tokens" in row:
        return _of_tokens(row, name)
    keys = ", ".join(map(repr, row)) or "none"
    talk = "; a conversation is messages: [{role, content}, …]" if TALK & {*row} else ""
    raise ValueError(f"none of tokens, text, messages, prompt with response; its keys: {keys}{talk}")


def outside(tokens: Iterable[int], vocabulary: int) -> str:
    """Say which of the tokens is the first that the vocabulary lacks."""
    token = next(token for token in tokens if not 0 <= token < vocabulary)
    return f"token {token} is outside the model's vocabulary{f' of {vocabulary}' if token > 0 else ''}"


def _of_tokens(row: dict[str, Any], name: str | int) -> list[Sequence]:
    tokens = ids(row["tokens"], "tokens", None)
    if (mask := row.get("attention_mask")) is not None:
        if not isinstance(mask, list) or len(mask) != len(tokens):
            raise ValueError("attention_mask has another length than tokens")
        tokens = [token for token, kept in zip(tokens, mask, strict=True) if kept]
    if (ends := row.get("cu_seqlens")) is not None:
        ends = ids(ends, "cu_seqlens", None)
        if ends[:1] != [0] or ends != sorted(ends) or ends[-1] > len(tokens):
            raise ValueError("cu_seqlens must rise from 0 to at most the number of tokens")
        pairs = itertools.pairwise(ends)
        return [Sequence(f"{name}[{n}]", tokens[a:b], 1) for n, (a, b) in enumerate(pairs)]
    first = row.get("prompt_length", 1)
    if type(first) is not int or first < 0:
        raise ValueError("prompt_length must be a number of tokens")
    return [Sequence(name, tokens, max(1, first))]


def ids(value: Any, key: str, encode: Encode | None, *, special: bool = False) -> list[int]:
    """Token ids, or those of text. Raises ValueError. key: what the value is called. special: of `encode`."""
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a list of token ids{' or text' if encode else ''}")
    if encode is None:
        raise ValueError(f"{key} is text, and there is no tokenizer: --tokenizer FOLDER, or byte")
    return encode(value, special)


def conversation(codec: Codec | None, messages: Any, *, answer: bool) -> list[int]:
    """Token ids of messages, and of the start of an answer. ValueError: there is no template, or it refuses them."""
    if codec is None:
        raise ValueError("messages need a tokenizer with a chat template: --tokenizer FOLDER")
    if codec.template is None:
        raise ValueError("messages need a tokenizer with a chat template; write text as prompt")
    try:
        text = codec.template(messages, answer)
    except Exception as error:  # of the template's language, jinja2, or of what the template reads
        raise ValueError(f"messages: the chat template refuses them: {reason(error)}") from error
    return codec.encode(text, False)


def check_id(name: Any) -> str | int:
    """Return the unchanged id of a sequence. ValueError: it is neither text nor a number of 64 bits."""
    if not isinstance(name, str) and (type(name) is not int or abs(name) >= 2**63):
        raise ValueError("id must be text or a whole number")
    return name


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that hold something, with their numbers in it."""
    return ((number, line) for number, line in read_lines(file) if line.strip())
