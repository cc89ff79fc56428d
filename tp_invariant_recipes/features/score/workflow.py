"""`tpi score`: log-probabilities of sequences from a run's checkpoint or a Hugging Face folder.

While it runs, OUT.partial is a directory with the lines so far, the ranks' logs, and what is scored (`score.json`). The
same command goes on there after a stop. Then the lines become OUT, and what was scored OUT.meta.json.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError
from tp_invariant_recipes.features.score import output, vocabulary
from tp_invariant_recipes.features.score.model import FileJob, model_of
from tp_invariant_recipes.features.score.output import read_json
from tp_invariant_recipes.features.train import workflow as train
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.settings.run_config import RunConfig

# Option -> the name of what sums over the vocabulary give.
SUMS = {"entropy": "entropies", "digest": "digests", "vocab": "vocabulary"}
DEFAULT_TOKENS = 16384  # of a forward pass, where sequences share one


@dataclass(frozen=True)
class Options:
    """step, tokenizer: None: the newest, the folder's. tokens: of a forward pass.

    entropies: OUT must have them. vocabulary: all log-probabilities, beside OUT. against: OUT is compared.
    """

    step: int | None = None
    tokenizer: str | None = None
    tokens: int = DEFAULT_TOKENS
    ranks: bool = False
    entropies: bool = False
    digests: bool = False
    vocabulary: bool = False
    against: bool = False

    @property
    def columns(self) -> dict[str, bool]:
        """What a new OUT has beside log-probabilities: what a temperature would change depends on the entropy."""
        return {
            "ranks": self.ranks,
            "entropies": self.entropies or self.against,
            "digests": self.digests,
            **({"vocabulary": True} if self.vocabulary else {}),
        }


@dataclass(frozen=True)
class Scoring(FileJob):
    """A scoring, ready to start. scored: tokens of the file that are."""

    file: Path
    options: Options
    scored: int

    @property
    def lines(self) -> Path:
        """The lines so far."""
        return self.partial.path / "scores.jsonl"

    @property
    def count(self) -> int:
        """Sequences of the file."""
        return self.identity["sequences"]["count"]


def new(source: Path, file: Path, overrides: Sequence[str], out: Path, options: Options) -> Scoring:
    """Plan a scoring. Nothing is written. Raises a TpiError that lists what is wrong.

    source: a run directory or a Hugging Face folder. file: of sequences. overrides: as typed.
    """
    tokens = [f"--batch-tokens {options.tokens}: must be at least 1"] if options.tokens < 1 else []

    def unfit(config: RunConfig) -> list[str]:
        tp = config.layout.tp
        words = [f"--{word}" for word, name in SUMS.items() if options.columns.get(name)]
        if config.numerics.invariant or not words or not tp & (tp - 1):
            return []
        return [f"{' and '.join(words)}: tp={tp} under numerics=stock: entropies and digests need a power of two"]

    loaded = model_of(source, parse_all(overrides), options.step, "tpi score", unfit, tokens, of_rollouts(file)[0])
    config = loaded.config
    tokenizer = options.tokenizer or loaded.tokenizer
    encode, digest = None, None
    if tokenizer is not None:
        encode, _, digest, _ = sequences.tokenizer(tokenizer)
    file, out = file.expanduser().absolute(), out.expanduser().absolute()
    read = sequences.survey(file, config.shape.vocabulary, encode)
    if loaded.longest is not None and read.longest > loaded.longest:
        positions = f"the model has learned {loaded.longest} positions"
        raise ConfigError(f"{file}: a sequence has {read.longest} tokens, and {positions}; leave longer ones out")
    identity = loaded.identity | {
        "sequences": {"sha256": read.sha256, "count": read.sequences, "tokenizer": digest},
        "columns": options.columns,
    }
    if "layout" in identity:
        identity["layout"] |= {"tokens": options.tokens}
    return Scoring(loaded.plan(out), loaded.checkpoint, out, tokenizer, identity, file, options, read.scored)


def of_rollouts(file: Path) -> tuple[str, bool]:
    """Return the numerics of rollouts, and whether they have digests; of another file the default, and False."""
    there = read_json(output.meta(file.expanduser()))
    if not isinstance(there, dict) or "requests" not in there or not isinstance(there.get("numerics"), dict):
        return mode.DEFAULT, False
    return there["numerics"].get("mode", mode.DEFAULT), bool(there.get("digests"))


def finished(scoring: Scoring) -> bool:
    """Whether OUT has these scores, maybe with more columns. Raises RunError: it has others, or was changed since."""
    wanted = {name for name in ("ranks", "entropies", "digests", "vocabulary") if getattr(scoring.options, name)}
    if scoring.options.vocabulary and scoring.out.exists() and not vocabulary.beside(scoring.out).is_file():
        raise RunError(f"{scoring.out} exists without {vocabulary.beside(scoring.out).name}: choose another --out FILE")
    return output.finished(scoring.out, "scores", lambda there: _serves(there, scoring.identity, wanted))


def has_entropies(scoring: Scoring) -> bool:
    """Return whether OUT, which is there, has entropies."""
    return bool(read_json(output.meta(scoring.out))["columns"]["entropies"])


def _serves(there: Any, identity: dict[str, Any], wanted: set[str]) -> bool:
    """Return whether scores that are there are those of an identity, with the columns that are wanted or more."""
    if not isinstance(there, dict) or not isinstance(columns := there.get("columns"), dict):
        return there == identity
    return there | {"columns": None} == identity | {"columns": None} and all(columns.get(name) for name in wanted)


def execute(scoring: Scoring, tick: Callable[[], None]) -> dict[str, Any]:
    """Score what is not scored yet. Returns how many sequences and tokens, and in what time.

    tick: called about ten times a second. Raises a TpiError; Interrupted: Ctrl-C, and the same command goes on.
    """
    from tp_invariant_recipes.features.score import lines
    from tp_invariant_recipes.features.score.head import Wanted
    from tp_invariant_recipes.features.score.rank import Score

    train.validate(scoring.plan)
    folder = scoring.partial
    with locked(folder):
        output.claim(folder.path / "score.json", scoring.identity, "scores")
        done = lines.complete(scoring.lines)
        folder.logs.mkdir(exist_ok=True)
        if scoring.options.vocabulary:
            entries = scoring.plan.config.shape.vocabulary
            vocabulary.create(vocabulary.beside(scoring.lines), scoring.scored, entries)
        wanted = Wanted(**scoring.options.columns)
        do = Score(
            scoring.plan.config, scoring.checkpoint, scoring.file, scoring.tokenizer, scoring.lines, done,
            scoring.options.tokens, wanted,
        )  # fmt: skip
        begun = time.monotonic()
        speed = None
        if done < scoring.count:
            scoring.lines.with_name(lines.TIMES).unlink(missing_ok=True)
            if not scoring.completes(tick, do):
                done = lines.complete(scoring.lines)
                raise Interrupted(
                    f"stopped: {done} of {scoring.count} sequences are scored, and the same command goes on"
                )
            speed = lines.tokens_per_second(scoring.lines)
        if (reached := lines.complete(scoring.lines)) != scoring.count:
            raise RunError(
                f"{scoring.lines} has {reached} lines of {scoring.count}: the same command goes on in {folder.path}"
            )
        if scoring.options.vocabulary:
            vocabulary.publish(scoring.lines, scoring.out)
        output.publish(scoring.lines, scoring.out, scoring.identity)
    shutil.rmtree(folder.path, ignore_errors=True)
    seconds = round(time.monotonic() - begun, 2)
    return {"sequences": scoring.count - done, "seconds": seconds, "tokens_per_second": speed and round(speed)}
