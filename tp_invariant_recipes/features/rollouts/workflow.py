# SPDX-License-Identifier: Apache-2.0
"""`tpi generate`: completions of the requests of a file, by a run's checkpoint or a Hugging Face folder.

While it runs, OUT.partial is a directory with the completions that have ended, the ranks' logs, and what is generated
(`rollouts.json`). With --resume the same command continues there, in any layout. Then the lines become OUT, and what
decides them OUT.meta.json.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from tp_invariant_recipes.check import rollouts as check
from tp_invariant_recipes.config.overrides import Override, parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, refuse
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.inference.model import FileJob, model_of
from tp_invariant_recipes.features.rollouts import prompts, requests
from tp_invariant_recipes.features.rollouts.requests import Request, Sampling
from tp_invariant_recipes.features.rollouts.schedule import BLOCK
from tp_invariant_recipes.launch import train
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.settings.keys import nearest

MODE = "portable"  # the numerics of a folder


@dataclass(frozen=True)
class GenerateRequest:
    """What to complete, and with what.

    source: a run directory or a Hugging Face folder. prompts: a file. overrides: as typed, fields of `Sampling` too.
    out: None: named after the prompts. step, tokenizer: None: the newest, the folder's. digests: of every token.
    resume: OUT.partial may have some completions. engine: keywords of `Engine`, which change no bit.
    """

    source: Path
    prompts: Path
    overrides: Sequence[str] = ()
    out: Path | None = None
    step: int | None = None
    tokenizer: str | None = None
    digests: bool = False
    resume: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation(FileJob):
    """Rollouts, ready to start."""

    request: GenerateRequest
    requests: list[Request]

    @cached_property
    def count(self) -> int:
        """Completions of all requests."""
        return sum(request.sampling.num_return_sequences for request in self.requests)


@dataclass(frozen=True)
class GenerateResult(Result):
    """What `generate` did. completions: of all prompts. tokens, seconds: made now; None: all were there, or a dry run.

    speed: tokens a second; None: not measured.
    """

    rollouts: Path
    completions: int
    tokens: int | None = None
    seconds: float | None = None
    speed: int | None = None

    @property
    def exit_status(self) -> int:
        """0: written."""
        return 0

    def lines(self) -> list[str]:
        """Return nothing: the file is the result."""
        return []

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        done = {"tokens": self.tokens, "seconds": self.seconds, "tokens_per_second": self.speed}
        made = {name: value for name, value in done.items() if self.tokens is not None}
        return {"rollouts": str(self.rollouts), "completions": self.completions} | made


def generate(request: GenerateRequest, console: Console, *, dry_run: bool = False) -> GenerateResult:
    """Complete what is not completed yet; in a dry run only check it. Raises a TpiError; Interrupted: Ctrl-C.

    console: for progress, and the line that says what was written.
    """
    out = request.out or Path(f"{request.prompts.name.removesuffix('.jsonl')}.rollouts.jsonl")
    refuse(output.check_written(out))
    output.check_unchanged(out.expanduser())
    with progress.busy(console, "reading weights and prompts"):
        job = plan(request, out)
    counts = f"{job.count:,} completions of {len(job.requests):,} prompts"
    result = GenerateResult(job.out, job.count)
    written = finished(job)
    if dry_run:
        terminal.print_line(console, f"{job.out}: {counts} {'are there' if written else 'would be written'}")
        return result
    if not written:
        with progress.busy(console, "importing Megatron-Bridge and checking the configuration"):
            train.validate(job.plan)
        with progress.Counter(console) as counter:
            result = execute(job, counter.counting("generating:", " completions"))
    speed = f", {result.speed:,} tokens/s" if result.speed else ""
    terminal.print_line(console, f"{job.out}: {counts}{speed}")
    return result


def plan(request: GenerateRequest, out: Path) -> Generation:
    """Plan rollouts. Nothing is written. Raises a TpiError that lists what is wrong."""
    from tp_invariant_recipes.portable.ieee import draw  # torch, which is imported once something is said

    source, file = request.source, request.prompts
    words = parse_all(request.overrides)
    typed = [word for word in words if word.key in prompts.NAMES]
    sampling, problems = _sampling(typed)
    file, out = file.expanduser().absolute(), out.expanduser().absolute()
    if not file.is_file():
        problems.append(f"{file}: no such file")
    unknown = [word for word in words if "." not in word.field and word.key not in prompts.NAMES]
    hints = {word.text: nearest(word.key, prompts.NAMES) for word in unknown}
    misspelt = {text: hint for text, hint in hints.items() if "mean" in hint}
    problems += [f"{text}: no such key{hint}" for text, hint in misspelt.items()]
    rest = [word for word in words if word not in typed and word.text not in misspelt]
    loaded = model_of(source, rest, request.step, "tpi generate", check.problems, problems, MODE)
    where = request.tokenizer or loaded.tokenizer
    tokenizer = sequences.tokenizer(where) if where else None
    vocabulary = loaded.config.shape.vocabulary
    if not any(prompts.SHORT_NAMES.get(word.key, word.key) == "eos_token_id" for word in typed):
        folder = None if loaded.checkpoint else source.expanduser()
        sampling = replace(sampling, eos_token_id=prompts.end_tokens(folder, tokenizer, vocabulary))
    read = prompts.read(file, tokenizer, sampling)
    cache = request.engine.get("tokens")
    from tp_invariant_recipes.portable.ieee.rotary import LARGEST_ANGLE

    limits = loaded.longest, LARGEST_ANGLE, None if cache is None else cache // BLOCK * BLOCK
    requests.check(read, vocabulary, min(int(limit) for limit in limits if limit is not None), text=bool(tokenizer))
    identity = loaded.identity | {
        "requests": {"sha256": prompts.digest(read), "count": len(read)},
        "tokenizer": tokenizer.digest if tokenizer else None,
        "sampling": json.loads(json.dumps(asdict(sampling))),
        "digests": request.digests,
        "draws": draw.DEFINITION,
    }
    return Generation(loaded.plan(out), loaded.checkpoint, out, where, identity, request, read)


def _sampling(typed: Sequence[Override]) -> tuple[Sampling, list[str]]:
    problems = [f"{word.text}: one value, not a sweep" for word in typed if not word.single]
    if not problems:
        try:
            values = ((word.key, word.data) for word in typed)
            return prompts.settled(values, Sampling()), []
        except ConfigError as error:
            problems = [*error.problems]
        except TypeError as error:
            problems = [f"{' '.join(word.text for word in typed)}: {error}"]
    return Sampling(), problems


def finished(generation: Generation) -> bool:
    """Whether OUT has these rollouts. Raises RunError: it has others, or was changed since."""
    return output.finished(generation.out, "rollouts", lambda there: there == generation.identity)


def execute(generation: Generation, show: Callable[[int, int, str], None] = lambda *_: None) -> GenerateResult:
    """Complete what is not completed yet. show: told completions, of how many, and the speed. Raises as `generate`."""
    from tp_invariant_recipes.features.rollouts.engine import Generate

    folder = generation.partial.path
    with locked(generation.partial):
        output.claim(folder / "rollouts.json", generation.identity, "rollouts")
        where = prompts.places(folder)
        if where and not generation.request.resume:
            raise RunError(f"{folder} has {len(where)} of {generation.count} completions: --resume, or remove it")
        samples = {request: range(request.sampling.num_return_sequences) for request in generation.requests}
        remaining = [request for request, own in samples.items() if any((request.id, n) not in where for n in own)]
        before = generation.count - sum(len(samples[request]) for request in remaining)
        generation.partial.logs.mkdir(exist_ok=True)
        written = output.Written(folder, prompts.PARTS)

        def tick() -> None:
            written.look()
            show(before + written.lines, generation.count, written.speed_in_words)

        if remaining:
            engine = {**generation.request.engine, "digests": generation.request.digests}
            config, checkpoint = generation.plan.config, generation.checkpoint
            do = Generate(config, checkpoint, remaining, folder, generation.tokenizer, engine)
            whole = generation.completes(tick, do)
            where = prompts.places(folder)
            if not whole:
                raise Interrupted(
                    f"stopped: {len(where)} of {generation.count} completions are written; --resume continues"
                )
            tick()
        if len(where) != generation.count:
            raise RunError(f"{folder} has {len(where)} of {generation.count} completions; --resume continues")
        file = folder / "rollouts.jsonl"
        prompts.join(file, generation.requests, where)
        output.publish(file, generation.out, generation.identity)
    shutil.rmtree(folder, ignore_errors=True)
    speed = round(written.speed) if written.speed else None
    return GenerateResult(generation.out, generation.count, written.tokens, round(written.seconds, 2), speed)
