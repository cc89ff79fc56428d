# SPDX-License-Identifier: Apache-2.0
"""Requests as JSONL, one object a line, and fields of `Sampling` as they are typed.

    {"prompt": "2 + 3 ="}                        text or token ids, with the special tokens that the tokenizer adds
    {"tokens": [5, 6, 7]}                        token ids
    {"messages": [{"role": "user", …}, …]}       by the tokenizer's chat template, with the start of an answer

"id" names a request, else its line does. Fields of `Sampling` beside them hold for this request alone. tpi does not
read "metadata", such as the answer to a question.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.data.sequences import Codec
from tp_invariant_recipes.data.tokenizer import BYTE_EOD
from tp_invariant_recipes.errors import ConfigError, RunError, TpiError, reason, refuse
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.rollouts.requests import SHOWN, Completion, Request, Sampling
from tp_invariant_recipes.reading import MIB, TOKENS, parse_json, parse_object, read_limited, read_lines
from tp_invariant_recipes.runs.run_dir import writing
from tp_invariant_recipes.settings.keys import nearest

PARTS = "part-*.jsonl"
COLUMNS = ("logprobs", "ranks")
Place = tuple[str, int]  # a request's id, and a sample


def writer(
    folder: Path, rank: int, requests: Sequence[Request], decode: Callable[[list[int]], str] | None
) -> Callable[[Completion], None]:
    """Return what appends a completion to the file of a data-parallel rank; it raises RunError."""
    prompt = {request.id: request.tokens for request in requests}
    file = folder / PARTS.replace("*", str(rank))
    stream = file.open("ab", buffering=0)

    def append(completion: Completion) -> None:
        data = line(prompt[completion.request], completion, decode)
        with writing(file, "--out FILE"):
            if stream.write(data) != len(data):  # `places` cuts off the rest
                raise RunError(f"cannot write {file}: the disk is full, or a limit of its size is reached")

    return append


def line(prompt: Sequence[int], completion: Completion, decode: Callable[[list[int]], str] | None) -> bytes:
    """Format one line. decode: None: there is no tokenizer."""
    tokens = [*completion.tokens]
    name = f"{completion.request}[{completion.sample}]"
    values = np.array([completion.log_probabilities, completion.ranks], np.float64)
    start = {
        "id": name, "request": completion.request, "sample": completion.sample, "prompt_token_ids": [*prompt],
    }  # fmt: skip
    scored = output.line(sequences.Sequence(name, tokens, 0), values, COLUMNS, start)
    end: dict[str, object] = {"finish_reason": completion.finish_reason}
    if decode is not None:
        end["text"] = decode(tokens)
    if completion.digests:
        end["digests"] = [f"{digest & (2**64 - 1):016x}" for digest in completion.digests]
    return scored[:-2] + b", " + json.dumps(end)[1:].encode() + b"\n"


def places(folder: Path) -> dict[Place, tuple[Path, int, int]]:
    """Where the completions are: file, first byte, bytes. A torn last line is cut off. RunError: a line is none."""
    where: dict[Place, tuple[Path, int, int]] = {}
    for part in sorted(folder.glob(PARTS)):
        output.complete(part)
        at = 0
        try:
            for _, data in read_lines(part):
                row = parse_object(data, most=TOKENS)
                where[row["request"], row["sample"]] = part, at, len(data)
                at += len(data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{part} is damaged: {reason(error)}; remove it, and --resume computes it again") from error
    return where


def join(file: Path, requests: Sequence[Request], where: dict[Place, tuple[Path, int, int]]) -> None:
    """Write the lines of all completions, in the order of the requests, to the disk. Raises RunError."""
    with writing(file, "--out FILE"), file.open("wb") as whole:
        for request in requests:
            for sample in range(request.sampling.num_return_sequences):
                part, at, size = where[request.id, sample]
                with part.open("rb") as stream:
                    stream.seek(at)
                    whole.write(stream.read(size))
        whole.flush()
        os.fsync(whole.fileno())


SHORT_NAMES = {"max_tokens": "max_new_tokens", "n": "num_return_sequences", "stop": "stop_strings"}
NAMES = (*(field.name for field in fields(Sampling)), *SHORT_NAMES)  # of what is sampled
PROMPTS = ("prompt", "tokens", "messages")
KEYS = ("id", *PROMPTS, "metadata", *NAMES)


def settled(values: Iterable[tuple[str, Any]], base: Sampling) -> Sampling:
    """Return `base` with other values, by their names or short names. Raises ConfigError, TypeError."""
    changes: dict[str, Any] = {}
    for name, value in values:
        field = SHORT_NAMES.get(name, name)
        if field in changes:
            raise ConfigError(f"{field} is there twice")
        changes[field] = value
    return replace(base, **changes)


def end_tokens(folder: Path | None, tokenizer: Codec | None, vocabulary: int) -> tuple[int, ...]:
    """Find the tokens that end a text in a folder of Hugging Face; None, or where it names none: the tokenizer's."""
    for name in ("generation_config.json", "config.json") if folder else ():
        file = Path(str(folder)) / name
        try:
            value = parse_json(read_limited(file, MIB)).get("eos_token_id") if file.is_file() else None
            ids = Sampling(eos_token_id=value).eos_token_id if value is not None else ()
        except (OSError, ValueError, TypeError, AttributeError, TpiError) as error:
            raise ConfigError(f"{file}: {reason(error)}; eos_token_id=… names the tokens that end a text") from error
        if ids:
            return ids
    if tokenizer is None:
        return ()
    end = BYTE_EOD if tokenizer.loaded is None else tokenizer.loaded.eos_token_id
    return (int(end),) if end is not None and end < vocabulary else ()


def read(file: Path, tokenizer: Codec | None, sampling: Sampling) -> list[Request]:
    """All requests. Raises ConfigError that lists lines and what is wrong with them."""
    requests: list[Request] = []
    problems: list[str] = []
    try:
        for number, line in ((n, line) for n, line in read_lines(file) if line.strip()):
            try:
                requests.append(parse(line, number, tokenizer, sampling))
            except (ValueError, TypeError, OverflowError, TpiError) as error:
                whys = error.problems if isinstance(error, ConfigError) else (reason(error),)
                problems += [f"{file}, line {number}: {why}" for why in whys]
            if len(problems) >= SHOWN:
                break
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {reason(error)}") from error
    refuse(problems or ([] if requests else [f"{file}: no requests in it"]))
    return requests


def parse(line: bytes, number: int, tokenizer: Codec | None, sampling: Sampling) -> Request:
    """Read the request of a line. number: the line's. sampling: its defaults. Raises ValueError, TpiError."""
    row = parse_object(line, constants=True, most=TOKENS)
    name = str(sequences.check_id(row.get("id", number)))
    if unknown := [f"{key}: no such key{nearest(key, KEYS)}" for key in row if key not in KEYS]:
        refuse([*unknown, f"a line's keys are {', '.join(KEYS)}; tpi does not read what is in metadata"])
    given = [(key, value) for key, value in row.items() if key in NAMES]
    prompts = [key for key in PROMPTS if key in row]
    if len(prompts) != 1:
        raise ValueError(f"a request has one of {', '.join(PROMPTS)}; its keys: {', '.join(row) or 'none'}")
    return Request(name, tuple(_tokens(prompts[0], row[prompts[0]], tokenizer)), settled(given, sampling))


def _tokens(key: str, value: Any, tokenizer: Codec | None) -> list[int]:
    if key == "messages":
        return sequences.conversation(tokenizer, value, answer=True)
    if key == "tokens" and isinstance(value, str):
        raise ValueError("tokens must be a list of token ids; text is a prompt")
    return sequences.ids(value, key, tokenizer.encode if tokenizer and key == "prompt" else None, special=True)


def digest(requests: list[Request]) -> str:
    """Return the SHA-256 of what decides the completions, in hex."""
    sha256 = hashlib.sha256()
    for request in requests:
        sha256.update(json.dumps([request.id, request.tokens, asdict(request.sampling)]).encode() + b"\n")
    return sha256.hexdigest()
