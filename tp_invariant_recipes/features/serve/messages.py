# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the ranks tell each other, through one pipe for each rank.

A rank that listens reads messages and passes them on to the ranks that compute with it, so that all of these apply them
before the same pass.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.features.rollouts.requests import Request

ABORT = "abort"  # the finish reason of a completion that was asked to leave
Versions = tuple[tuple[str, int], ...]  # versions of weights, and the tokens that each has drawn, in order


class Weights(NamedTuple):
    """Where weights are. folder: of Hugging Face; checkpoint: of a run; one of both. version: their digest."""

    folder: Path | None
    checkpoint: Path | None
    version: str


class Join(NamedTuple):
    """Complete a request. request: its id is the key, by which answers name it. draws: the id of its draws.

    home: the data-parallel rank that computes it. stream: whether each token is told when it is drawn.
    """

    request: Request
    draws: str
    home: int
    stream: bool


class Leave(NamedTuple):
    """End a request: its samples have the reason ABORT, with the tokens drawn so far."""

    key: str


class Hold(NamedTuple):
    """Make no pass from now on, or make passes again. forget: give back the blocks of all sequences and prefixes."""

    held: bool
    forget: bool = False


class Task(NamedTuple):
    """Outside of passes, score sequences, or load weights, with which open requests continue: `Answer` follows."""

    key: str
    scored: Sequence[ScoredSequence] = ()
    weights: Weights | None = None


END = Task("")  # leave the loop
Message = Join | Leave | Hold | Task


class Ready(NamedTuple):
    """A rank has its model. home: its data-parallel rank. first: the rank that listens for it. tokens: of the cache."""

    home: int
    first: int
    tokens: int


class Drawn(NamedTuple):
    """New tokens of a sample. versions: of all its tokens. reason: why these are its last ones; None: they are not."""

    key: str
    sample: int
    tokens: Sequence[int]
    log_probabilities: Sequence[float]
    versions: Versions
    reason: str | None = None


class Answer(NamedTuple):
    """Of a task: the lines of `tpi score`. version: of weights from now on. problem: why it failed, or None."""

    key: str
    version: str
    lines: Sequence[bytes] = ()
    problem: str | None = None


Event = Ready | Drawn | Answer
