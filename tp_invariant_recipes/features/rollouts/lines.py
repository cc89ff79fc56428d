"""The lines of a file of rollouts: one completion each, by request in the order of the input, then by sample.

    {"id": "a[0]", "request": "a", "sample": 0, "prompt_token_ids": [5, 6], "token_ids": [9, 2],
     "logprobs": [-1.25, -0.5], "bits": ["bfa00000", "bf000000"], "ranks": [2, 1], "sum": -1.75,
     "finish_reason": "stop", "text": "…", "digests": ["9f2c…", "03b1…"]}

Numbers are as `features/inference/output.py` writes them. text: with a tokenizer. digests: with --digest.

While completions are computed, each data-parallel rank appends them to a file of its own as they end.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.rollouts.requests import Completion, Request
from tp_invariant_recipes.reading import TOKENS, parse_object, read_lines
from tp_invariant_recipes.runs.run_dir import writing

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
