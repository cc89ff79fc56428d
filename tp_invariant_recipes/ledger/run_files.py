"""The other files of a run directory as certificates, reports and commands read them: their types and largest sizes.

A file may have other fields beside these, and a field of another version of tpi is no error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, TypedDict

from tp_invariant_recipes.reading import MIB, Bounds, Count, Hash, Integer, Layout, Record, Seconds

LARGEST = 16 * MIB  # bytes of a JSON file of a run directory
LARGEST_CONFIG = MIB  # YAML is read slowly


class Job(TypedDict):
    """The SLURM job of an attempt."""

    id: NotRequired[str | None]


class Attempt(TypedDict):
    """One start of a run."""

    from_step: NotRequired[Count]
    to_step: NotRequired[Count]
    command: NotRequired[str]
    time: NotRequired[str]
    host: NotRequired[str]
    layout: NotRequired[Layout]
    job: NotRequired[Job | None]
    outcome: NotRequired[str | None]
    why: NotRequired[str | None]
    requeued: NotRequired[bool]


class _Typed(TypedDict, total=False):
    layout: Layout
    numerics: dict[str, Any]
    identity_hash: Hash
    notes: dict[str, Any]


class Attempted(_Typed):
    """`run.json` where only its attempts count."""

    attempts: list[Attempt]


class RunFile(Attempted):
    """`run.json` with all that a command needs to train the run again."""

    model: str
    overrides: list[str]
    device: str
    identity: dict[str, Any]


class CertifiedRun(TypedDict):
    """`run.json` in a certificate."""

    model: str
    identity_hash: Hash


class Train(TypedDict):
    """The section `train` of a configuration."""

    train_iters: Annotated[int, Bounds(ge=0, lt=2**63)]


class Config(TypedDict):
    """`config.yaml`."""

    train: Train


@dataclass(frozen=True, kw_only=True)
class ProgressLine(Record):
    """A line of `progress.jsonl`. Numbers may be NaN or infinite.

    loss, grad_norm: null: the step was skipped.
    seconds:         of the step. time: its end, in seconds since 1970.
    peak_memory:     the most bytes allocated on the last rank's GPU so far.
    """

    step: Count
    loss: float | None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: Count
    seconds: float
    peak_memory: Count | None = None
    time: float | None = None


@dataclass(frozen=True)
class Reason(Record):
    """`rank-N.error.json`: why a rank failed. time: seconds since 1970. ours: it raised a TpiError."""

    rank: Count
    time: Seconds
    kind: str
    message: str
    ours: bool
    errno: Integer | None


Environment = dict[str, str]
Versions = Mapping[str, str | Integer | float | bool | None]
