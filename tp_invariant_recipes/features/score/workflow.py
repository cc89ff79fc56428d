# SPDX-License-Identifier: Apache-2.0
"""`tpi score`: log-probabilities of sequences from a run's checkpoint or a Hugging Face folder.

While it runs, OUT.partial is a directory with the lines so far, the ranks' logs, and what is scored (`score.json`). The
same command goes on there after a stop. Then the lines become OUT, and what was scored OUT.meta.json.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tp_invariant_recipes.config.overrides import Override, given, parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, reason, refuse
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.inference.model import FileJob, early_problems, model_of
from tp_invariant_recipes.features.score import against, engine_scores, vocabulary
from tp_invariant_recipes.features.score.against import EngineDifference
from tp_invariant_recipes.launch import train
from tp_invariant_recipes.machine import progress, terminal
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.reading import read_lines
from tp_invariant_recipes.result import Result
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.settings.run_config import RunConfig

# Option -> the name of what sums over the vocabulary give.
SUMS = {"entropy": "entropies", "digest": "digests", "vocab": "vocabulary"}
DEFAULT_TOKENS = 16384  # of a forward pass, where sequences share one


@dataclass(frozen=True)
class ScoreRequest:
    """What to score, with what, and what to compare it with.

    source: a run directory or a Hugging Face folder. sequences: a file; None: `against`, which `tpi generate` wrote.
    overrides: as typed. out: None: named after the sequences. step, tokenizer: None: the newest, the folder's.
    against: a file to compare OUT with. tolerance: the largest |d| that is no difference. partial: whether `against`
    may lack some of the scored tokens. tokens: of a forward pass. The other fields: columns of OUT beside
    log-probabilities, and all log-probabilities of the vocabulary, in a file beside OUT.
    """

    source: Path
    sequences: Path | None = None
    overrides: Sequence[str] = ()
    out: Path | None = None
    step: int | None = None
    tokenizer: str | None = None
    against: Path | None = None
    tolerance: float = 0.0
    partial: bool = False
    tokens: int = DEFAULT_TOKENS
    ranks: bool = False
    entropies: bool = False
    digests: bool = False
    vocabulary: bool = False

    @property
    def columns(self) -> dict[str, bool]:
        """What a new OUT has beside log-probabilities: what a temperature would change depends on the entropy."""
        return {
            "ranks": self.ranks,
            "entropies": self.entropies or self.against is not None,
            "digests": self.digests,
            **({"vocabulary": True} if self.vocabulary else {}),
        }


@dataclass(frozen=True)
class Scoring(FileJob):
    """A scoring, ready to start. scored: tokens of the file that are."""

    file: Path
    request: ScoreRequest
    scored: int

    @property
    def lines(self) -> Path:
        """The lines so far."""
        return self.partial.path / "scores.jsonl"

    @property
    def count(self) -> int:
        """Sequences of the file."""
        return self.identity["sequences"]["count"]


@dataclass(frozen=True)
class ScoreResult(Result):
    """What `score` did. sequences, seconds: scored now; None: all were there. speed: tokens a second, if measured."""

    scores: Path
    sequences: int | None = None
    seconds: float | None = None
    speed: int | None = None
    against: EngineDifference | None = None

    @property
    def exit_status(self) -> int:
        """0: written, and equal or within the tolerance; 1: beyond it; 2: only a part was compared."""
        return self.against.exit_status if self.against else 0

    def lines(self) -> list[str]:
        """Return those of the comparison; none without one."""
        return self.against.lines() if self.against else []

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        done = {"sequences": self.sequences, "seconds": self.seconds, "tokens_per_second": self.speed}
        scored = {name: value for name, value in done.items() if self.sequences is not None}
        compared = self.against.as_json() if self.against else {}
        return {"scores": str(self.scores), "exit_status": self.exit_status} | scored | compared


def score(request: ScoreRequest, console: Console) -> ScoreResult:
    """Score what is not scored yet, and compare. Raises a TpiError; Interrupted: the same command goes on.

    console: for progress, and the line that says what was written.
    """
    request, file = _checked(request)
    with progress.busy(console, "reading weights and sequences"):
        job = plan(request, file)
    result = ScoreResult(job.out)
    if not finished(job):
        with progress.busy(console, "importing Megatron-Bridge and checking the configuration"):
            train.validate(job.plan)
        with progress.Counter(console) as counter:
            result = execute(job, counter.counting("scoring:", " sequences"))
    speed = f", {result.speed:,} tokens/s" if result.speed else ""
    terminal.print_line(console, f"{job.out}: {job.count:,} sequences{speed}")
    if request.against is None:
        return result
    decode = sequences.tokenizer(job.tokenizer).decode if job.tokenizer else None
    compared = against.compare(
        job.out, request.against, request.tolerance, decode, partial=request.partial, entries=request.vocabulary
    )
    return replace(result, against=compared)


def _checked(request: ScoreRequest) -> tuple[ScoreRequest, Path]:
    """Return the request with what follows from its files, and the file to score. Nothing big is read, or imported.

    Raises ConfigError that lists every folder or file that cannot be read, or written, or is of another format, and
    the overrides that this command does not read.
    """
    if request.against is None and (request.tolerance or request.partial):
        raise ConfigError("--tolerance and --partial go with --against FILE")
    file = request.sequences or request.against
    if file is None:
        raise ConfigError("name a file of SEQUENCES, or one of tpi generate with --against FILE")
    if file.expanduser().is_dir():
        raise ConfigError(f"{file}: a folder, where a file of SEQUENCES comes: tpi score RUN SEQUENCES")
    out = request.out or Path(f"{file.name.removesuffix('.jsonl')}.scores.jsonl")
    beside = vocabulary.check(request.against) if request.vocabulary else []
    early = early_problems(request.source, parse_all(request.overrides), request.step, "tpi score")
    refuse([*early, *beside, *_unfit(file, request.against), *output.check_written(out)])
    output.check_unchanged(out.expanduser())
    return replace(request, out=out, digests=request.digests or output.has_digests(file)), file


def _unfit(file: Path, against: Path | None) -> Iterator[str]:
    """Yield the problems of each file that is read, its first line included."""
    sequence = partial(sequences.parse, vocabulary=1 << 62, codec=sequences.ANY)  # whatever the model takes
    parsers: list[tuple[Path, Callable[[bytes, int], Any]]] = [(file, sequence)]
    if against is not None:
        parsers.append((against, engine_scores.parse))
    for read, parse in parsers:
        try:
            line = next((line for _, line in read_lines(read.expanduser()) if line.strip()), None)
        except (OSError, ValueError) as error:
            yield f"{read}: {reason(error)}"
            continue
        try:
            if line is None:
                yield f"{read}: it has no lines"
            else:
                parse(line, 1)
        except ValueError as error:
            yield f"{read}: its first line: {reason(error)}"


def plan(request: ScoreRequest, file: Path) -> Scoring:
    """Plan a scoring. Nothing is written. Raises a TpiError that lists what is wrong. file: of sequences."""
    assert request.out is not None, "_checked names it"
    tokens = [f"--batch-tokens {request.tokens}: must be at least 1"] if request.tokens < 1 else []

    def unfit(config: RunConfig) -> list[str]:
        tp = config.layout.tp
        words = [f"--{word}" for word, name in SUMS.items() if request.columns.get(name)]
        if config.numerics.invariant or not words or not tp & (tp - 1):
            return []
        return [f"{' and '.join(words)}: tp={tp} under numerics=stock: entropies and digests need a power of two"]

    loaded = model_of(request.source, _words(request, file), request.step, "tpi score", unfit, tokens, mode.DEFAULT)
    config = loaded.config
    tokenizer = request.tokenizer or loaded.tokenizer
    codec = sequences.tokenizer(tokenizer) if tokenizer is not None else None
    file, out = file.expanduser().absolute(), request.out.expanduser().absolute()
    read = sequences.survey(file, config.shape.vocabulary, codec)
    if loaded.longest is not None and read.longest > loaded.longest:
        positions = f"the model has learned {loaded.longest} positions"
        raise ConfigError(f"{file}: a sequence has {read.longest} tokens, and {positions}; leave longer ones out")
    identity = loaded.identity | {
        "sequences": {"sha256": read.sha256, "count": read.sequences, "tokenizer": codec and codec.digest},
        "columns": request.columns,
    }
    if "layout" in identity:
        identity["layout"] |= {"tokens": request.tokens}
    return Scoring(loaded.plan(out), loaded.checkpoint, out, tokenizer, identity, file, request, read.scored)


def _words(request: ScoreRequest, file: Path) -> list[Override]:
    """Return the overrides, and numerics of the rollouts unless typed, whatever a run was trained in."""
    words = parse_all(request.overrides)
    claimed = [name for f in (request.against, file) if f and (name := output.numerics_of(f, "requests"))]
    return [*words, *parse_all(f"numerics={name}" for name in claimed[:1] if not given(words, "numerics.mode"))]


def finished(scoring: Scoring) -> bool:
    """Whether OUT has these scores, maybe with more columns. Raises RunError: it has others, or was changed since."""
    wanted = {name for name in ("ranks", "entropies", "digests", "vocabulary") if getattr(scoring.request, name)}
    if scoring.request.vocabulary and scoring.out.exists() and not vocabulary.beside(scoring.out).is_file():
        raise RunError(f"{scoring.out} exists without {vocabulary.beside(scoring.out).name}: choose another --out FILE")
    return output.finished(scoring.out, "scores", lambda there: _serves(there, scoring.identity, wanted))


def _serves(there: Any, identity: dict[str, Any], wanted: set[str]) -> bool:
    """Return whether scores that are there are those of an identity, with the columns that are wanted or more."""
    if not isinstance(there, dict) or not isinstance(columns := there.get("columns"), dict):
        return there == identity
    return there | {"columns": None} == identity | {"columns": None} and all(columns.get(name) for name in wanted)


def execute(scoring: Scoring, show: Callable[[int, int, str], None]) -> ScoreResult:
    """Score what is not scored yet.

    show: told sequences, of how many, and the speed. Raises a TpiError; Interrupted: the same command goes on.
    """
    from tp_invariant_recipes.features.score.rank import Score, Wanted

    folder = scoring.partial
    with locked(folder):
        output.claim(folder.path / "score.json", scoring.identity, "scores")
        done = output.complete(scoring.lines)
        folder.logs.mkdir(exist_ok=True)
        if scoring.request.vocabulary:
            entries = scoring.plan.config.shape.vocabulary
            vocabulary.create(vocabulary.beside(scoring.lines), scoring.scored, entries)
        wanted = Wanted(**scoring.request.columns)
        do = Score(
            scoring.plan.config, scoring.checkpoint, scoring.file, scoring.tokenizer, scoring.lines, done,
            scoring.request.tokens, wanted,
        )  # fmt: skip
        begun, written = time.monotonic(), output.Written(folder.path, scoring.lines.name)

        def tick() -> None:
            written.look()
            show(done + written.lines, scoring.count, written.speed_in_words)

        if done < scoring.count:
            if not scoring.completes(tick, do):
                done = output.complete(scoring.lines)
                raise Interrupted(
                    f"stopped: {done} of {scoring.count} sequences are scored, and the same command goes on"
                )
            tick()
        if (reached := output.complete(scoring.lines)) != scoring.count:
            raise RunError(
                f"{scoring.lines} has {reached} lines of {scoring.count}: the same command goes on in {folder.path}"
            )
        if scoring.request.vocabulary:
            vocabulary.publish(scoring.lines, scoring.out)
        output.publish(scoring.lines, scoring.out, scoring.identity)
    shutil.rmtree(folder.path, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 2)
    return ScoreResult(scoring.out, scoring.count - done, seconds, round(written.speed) if written.speed else None)
