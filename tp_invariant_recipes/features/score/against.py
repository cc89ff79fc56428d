# SPDX-License-Identifier: Apache-2.0
"""`tpi score --against`: an engine's log-probabilities beside the scores, as figures and JSON."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.inference import output
from tp_invariant_recipes.features.score import difference, engine_scores, vocabulary
from tp_invariant_recipes.features.score.difference import Columns
from tp_invariant_recipes.features.score.engine_scores import Rollout
from tp_invariant_recipes.reading import TOKENS, parse_object, read_lines
from tp_invariant_recipes.text import plural

CONTEXT = 8  # tokens before one that is shown in its text


@dataclass(frozen=True, kw_only=True)
class EngineDifference:
    """A file of an engine beside scores.

    tolerance:      the largest |d| that is no difference. partial: whether a part of the tokens is enough.
    numerics:       of the scores and of the file; None: not known.
    sequences:      that are compared. not_in_file, not_in_scores: those that one of both lacks.
    scored, without_value: tokens of the scores, and those among them of which a sequence of the file has no value.
    differing:      log-probabilities that differ by bits. digests: of tokens, compared and differing.
    vocabulary:     as of `vocabulary.compare`; None: not compared. entropies: whether the scores have them.
    summary, suspects, by_position, by_token, worst: as of features/score/difference.py; the last two with their text.
    """

    scores: str
    file: str
    tolerance: float
    partial: bool
    numerics: tuple[str | None, str | None]
    sequences: int
    not_in_file: int
    not_in_scores: int
    scored: int
    without_value: int
    differing: int
    digests: dict[str, int]
    vocabulary: dict[str, int | float] | None
    entropies: bool
    summary: dict[str, Any]
    suspects: list[str]
    by_position: list[dict[str, Any]]
    by_token: list[dict[str, Any]]
    worst: list[dict[str, Any]]

    @property
    def beyond(self) -> bool:
        """Whether the file differs by more than the tolerance; without one, also by the bits of the vocabulary."""
        entries = self.vocabulary or {"largest": 0.0, "differing": 0}
        by_bits = not self.tolerance and (self.digests["differing"] or entries["differing"])
        return bool(max(self.summary["largest"], entries["largest"]) > self.tolerance or by_bits)

    @property
    def incomplete(self) -> bool:
        """Whether something was not compared."""
        return bool(self.not_in_file or self.without_value or self.not_in_scores)

    @property
    def exit_status(self) -> int:
        """1: beyond the tolerance. 2: not beyond it, as far as it was compared."""
        return 1 if self.beyond else 2 if self.incomplete and not self.partial else 0

    def lines(self) -> list[str]:
        """Return the numerics, the verdict, and what the differences look like, a line each."""
        own, engine = self.numerics
        modes = []
        if engine is not None:
            same = f"numerics: {own}, as in {self.file}"
            other = f"numerics: {own} here, {engine} in {self.file}, so bits differ; numerics={engine} compares"
            modes = [same if own == engine else other]
        unseen = f"no temperature is looked for: {self.scores} has no entropies; --entropy with another --out FILE"
        end = [unseen] if self.summary["largest"] and not self.entropies else []
        if self.exit_status == 2:
            end.append("only a part was compared: exit status 2; --partial accepts it")
        return [*modes, self._verdict(), *self.suspects, *end]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison for programs."""
        return {"schema": 2, **asdict(self), "not_compared": self._not_compared(), "text": "\n".join(self.lines())}

    def _verdict(self) -> str:
        figures, ratio = self.summary, f"[{difference.LOW:g}, {difference.HIGH:g}]"
        part, rest = " in part" if self.incomplete else "", f"{self._of_vocabulary()}{self._not_compared()}"
        if figures["largest"] == 0:
            every = "all " if self.scored == figures["tokens"] else ""
            count = f"{every}{figures['tokens']:,} log-probabilities"
            return f"equal{part}: {self.file}: {count}, {self.differing:,} differences by bits{rest}"
        verdict = "beyond" if figures["largest"] > self.tolerance else f"within{part}"
        return (
            f"{verdict} {self.tolerance:g}: {self.file}: mean KL {figures['k3']:.3g} (k3; k1 {figures['k1']:.3g}), "
            f"largest difference {figures['largest']:.3g}, 99.9 % below {figures['p999']:.3g}; "
            f"{figures['outside']:,} of {figures['tokens']:,} tokens leave the ratio {ratio}{rest}"
        )

    def _of_vocabulary(self) -> str:
        if self.vocabulary:
            return vocabulary.text(self.vocabulary)
        compared, differing = self.digests["compared"], self.digests["differing"]
        return f"; of the whole vocabulary, digests of {differing:,} of {compared:,} tokens differ" if compared else ""

    def _not_compared(self) -> str:
        """Return the end of the verdict: what was scored and not compared; empty: nothing."""
        parts = [f"{plural(self.not_in_file, 'sequence', ',')} that the file lacks"] if self.not_in_file else []
        if self.without_value:
            parts.append(f"{plural(self.without_value, 'token', ',')} without a value")
        text = f"; not compared, of {self.scored:,} scored tokens: {' and '.join(parts)}" if parts else ""
        if self.not_in_scores:
            text += f"; {plural(self.not_in_scores, 'row', ',')} of sequences that were not scored"
        return text


def compare(
    scores: Path,
    file: Path,
    tolerance: float = 0.0,
    decode: Callable[[list[int]], str] | None = None,
    *,
    partial: bool = False,
    entries: bool = False,
) -> EngineDifference:
    """Compare a file with the scores. Raises ConfigError.

    decode: token ids to text; None: there is no tokenizer. entries: whether all of the vocabulary are compared.
    """
    parts: list[Columns] = []
    ids: list[str | int] = []
    absent = scored = given = others = differing = 0
    digests = {"compared": 0, "differing": 0}
    for reference, rollout in _pairs(scores, file):
        if reference is None:
            others += 1
            continue
        scored += len(reference["token_ids"])
        absent += rollout is None
        if rollout is not None:
            given += len(reference["token_ids"])
            parts.append(_columns(len(ids), reference, rollout, file))
            differing += int((_bits(parts[-1].reference) != _bits(parts[-1].engine)).sum())
            pairs = [*zip(rollout.digests, reference.get("digests", ())[-len(rollout.digests) :], strict=False)]
            digests["compared"] += len(pairs)
            digests["differing"] += sum(mine != other for mine, other in pairs)
        ids.append(reference["id"])
    if not any(len(part.token) for part in parts):
        raise ConfigError(f"{file} has no log-probability of a token that was scored")
    columns = Columns.joined(parts)
    rows = difference.names(ids, difference.worst(columns))
    return EngineDifference(
        scores=str(scores),
        file=str(file),
        tolerance=tolerance,
        partial=partial,
        numerics=(output.numerics_of(scores), output.numerics_of(file)),
        sequences=len(ids) - absent,
        not_in_file=absent,
        not_in_scores=others,
        scored=scored,
        without_value=given - len(columns.token),
        differing=differing,
        digests=digests,
        vocabulary=vocabulary.compare(scores, file) if entries else None,
        entropies=bool(np.isfinite(columns.entropy).all()),
        summary=difference.summary(columns),
        suspects=difference.suspects(columns),
        by_position=difference.by_position(columns),
        by_token=[row | {"text": decode([row["token"]]) if decode else ""} for row in difference.by_token(columns)],
        worst=[row | {"text": text} for row, text in zip(rows, _texts(scores, rows, decode), strict=True)],
    )


def _pairs(scores: Path, file: Path) -> Iterator[tuple[dict[str, Any] | None, Rollout | None]]:
    """Each line of the scores with its sequence's row, by id or else in order; then the other rows."""
    rows = engine_scores.read(file)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{file}: no rows in it")
    if first.id is None:
        for reference, row in zip_longest(_scores(scores), chain([first], rows)):
            if row is None or reference is None:
                raise ConfigError(f"{file} and {scores} have not as many rows, and rows without an id are in one order")
            if row.id is not None:
                raise ConfigError(f"{file}, line {row.line}: the row has an id, and the first has none")
            yield reference, row
        return
    named: dict[str | int | None, Rollout] = {}
    for row in chain([first], rows):
        if row.id is None or row.id in named:
            what = "it has no id, and the first row has one" if row.id is None else f"id {row.id!r} is there twice"
            raise ConfigError(f"{file}, line {row.line}: {what}; each row needs the id of its sequence")
        named[row.id] = row
    seen = set()
    for reference in _scores(scores):
        if reference["id"] in seen:
            raise ConfigError(f"{scores} has the id {reference['id']!r} twice: which row of {file} belongs to it?")
        seen.add(reference["id"])
        yield reference, named.get(reference["id"])
    yield from ((None, row) for name, row in named.items() if name not in seen)


def _scores(file: Path) -> Iterator[dict[str, Any]]:
    yield from (parse_object(line, most=TOKENS) for _, line in read_lines(file))


def _columns(sequence: int, reference: dict[str, Any], rollout: Rollout, file: Path) -> Columns:
    """Return the last tokens of both, which are the same tokens. Raises ConfigError: they are not."""
    count = min(len(reference["token_ids"]), len(rollout.tokens))
    ids = np.array(reference["token_ids"][-count:], np.int64)
    wrong = np.flatnonzero(ids != np.array(rollout.tokens[-count:], np.int64))
    if len(wrong):
        at = int(wrong[-1])
        raise ConfigError(
            f"{file}, line {rollout.line}: other tokens than sequence {reference['id']} has: "
            f"{rollout.tokens[-count:][at]} instead of {ids[at]}, {count - at} before the end; the last must be equal"
        )
    # Engines have fp32, of which a short decimal is not exact in fp64.
    given = np.array([np.nan if x is None else x for x in rollout.logprobs[-count:]], np.float32)
    engine = given.astype(np.float64)
    kept = ~np.isnan(engine)
    end = reference["first"] + len(reference["token_ids"])
    entropy = reference.get("entropies", [np.nan] * count)[-count:]
    return Columns(
        sequence=np.full(count, sequence, np.int32)[kept],
        position=np.arange(end - count, end, dtype=np.int32)[kept],
        token=ids[kept],
        reference=np.array(reference["logprobs"][-count:], np.float32).astype(np.float64)[kept],
        engine=engine[kept],
        entropy=np.array(entropy, np.float64)[kept],
    )


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32)


def _texts(scores: Path, rows: list[dict[str, Any]], decode: Callable[[list[int]], str] | None) -> list[str]:
    """Return the text that ends with the token of each row; without a tokenizer nothing."""
    if decode is None:
        return [""] * len(rows)
    wanted = {row["sequence"] for row in rows}
    lines = {score["id"]: score for score in _scores(scores) if score["id"] in wanted}
    texts = []
    for row in rows:
        score = lines[row["sequence"]]
        end = row["position"] - score["first"] + 1
        texts.append(decode(score["token_ids"][max(0, end - CONTEXT) : end]))
    return texts
