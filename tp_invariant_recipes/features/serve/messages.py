# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the ranks tell each other, through one pipe for each rank.

A rank that listens reads messages and passes them on to the ranks that compute with it, so that all of these apply them
before the same pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.data.sequences import Sequence as ScoredSequence
from tp_invariant_recipes.features.rollouts.requests import Completion, Request

ABORT = "abort"  # the finish reason of a completion that was asked to leave
Versions = tuple[tuple[str, int], ...]  # versions of weights, and the tokens that each has drawn, in order


@dataclass(frozen=True)
class Weights:
    """Where weights are. folder: of Hugging Face; checkpoint: of a run; one of both. version: their digest."""

    folder: Path | None
    checkpoint: Path | None
    version: str


@dataclass(frozen=True)
class Join:
    """Complete a request. request: its id is the key, by which answers name it. draws: the id of its draws.

    home: the data-parallel rank that computes it. stream: whether each token is told when it is drawn.
    """

    request: Request
    draws: str
    home: int
    stream: bool


@dataclass(frozen=True)
class Leave:
    """End a request: `Ended` follows, with the tokens drawn so far."""

    key: str


@dataclass(frozen=True)
class Hold:
    """Make no pass from now on, or make passes again. forget: give back the blocks of all sequences and prefixes."""

    held: bool
    forget: bool = False


@dataclass(frozen=True)
class Score:
    """Score sequences: `Answer` follows."""

    key: str
    sequences: Sequence[ScoredSequence]


@dataclass(frozen=True)
class Load:
    """Load weights: `Answer` follows. Sequences that have not ended continue with them."""

    key: str
    weights: Weights


@dataclass(frozen=True)
class End:
    """Leave the loop."""


Message = Join | Leave | Hold | Score | Load | End


@dataclass(frozen=True)
class Ready:
    """The rank has its model. home: its data-parallel rank. listens: whether it reads messages.

    tokens: of the cache, at most.
    """

    home: int
    listens: bool
    tokens: int


@dataclass(frozen=True)
class Drawn:
    """New tokens of a sample. versions: of all its tokens."""

    key: str
    sample: int
    tokens: Sequence[int]
    log_probabilities: Sequence[float]
    versions: Versions


@dataclass(frozen=True)
class Ended:
    """A sample has its last token."""

    completion: Completion
    versions: Versions


@dataclass(frozen=True)
class Answer:
    """Of `Score`: the lines of `tpi score`. Of `Load`: none. problem: why it was not done; None: it was.

    version: of the weights from now on.
    """

    key: str
    version: str
    lines: Sequence[bytes] = ()
    problem: str | None = None


Event = Ready | Drawn | Ended | Answer
