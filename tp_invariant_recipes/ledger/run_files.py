# SPDX-License-Identifier: Apache-2.0
"""The other files of a run directory as certificates, reports and commands read them: their types and largest sizes.

A file may have other fields beside these, and a field of another version of tpi is no error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from tp_invariant_recipes.ledger.schema import Header
from tp_invariant_recipes.reading import MIB, Bounds, Count, Hash, Integer, Layout, Listed, Record, Seconds

_LAYOUT = "layout."
Span = tuple[int, str]  # the first step, and what holds from there on
_DEGREES = ("tp", "pp", "cp", "dp", "ep", "etp")


def words(degrees: Mapping[str, Any]) -> str:
    """Return the degrees above 1 as they are typed: "tp=2 dp=4"; "tp=1" where there is none."""
    counts = ((name, degrees.get(name)) for name in _DEGREES)
    return " ".join(f"{name}={count}" for name, count in counts if isinstance(count, int) and count > 1) or "tp=1"


def ranks(degrees: Mapping[str, Any]) -> int:
    """How many ranks a layout has."""
    return math.prod(int(degrees.get(name, 1)) for name in ("tp", "pp", "cp", "dp"))


def changes(header: Header) -> list[Span]:
    """Return the layouts; empty: the degrees never changed."""

    def layout(changed: Mapping[str, Any]) -> str:
        own = {name.removeprefix(_LAYOUT): value for name, value in changed.items() if name.startswith(_LAYOUT)}
        return words(header.layout | own)

    layouts = spans(header, layout)
    return layouts if len(layouts) > 1 else []


def spans(header: Header, value: Callable[[Mapping[str, Any]], str]) -> list[Span]:
    """(first step, value from there on) of what resumes have changed. value: of the fields that then differ."""
    values = [(1, value({}))]
    for entry in header.notes.get("resumed", ()):
        later = value(entry["changed"])
        if later != values[-1][1]:
            values.append((entry["after_step"] + 1, later))
    return values


def spans_in_words(values: Sequence[Span]) -> str:
    """Such as "tp=2, from step 5 on tp=4"."""
    (_, first), *later = values
    return ", ".join([first, *(f"from step {step} on {value}" for step, value in later)])


LARGEST = 16 * MIB  # bytes of a JSON file of a run directory
LARGEST_CONFIG = MIB  # YAML is read slowly


JobId = Annotated[str, Bounds(pattern=r"^[0-9]{1,18}$")]  # an argument of scancel and squeue: no option of theirs


@dataclass(frozen=True)
class RestartJob(Record):
    """The SLURM job of an attempt. restart: how often SLURM had restarted it. nodes: as SLURM writes them."""

    id: JobId | None = None
    restart: Count = 0
    nodes: str = ""


@dataclass(frozen=True, kw_only=True)
class Restart(Record):
    """One start of a run.

    command, time, host: of the launcher; the time in ISO 8601.
    from_step, to_step:  steps completed when it starts, and planned for its end.
    layout:              the degrees of parallelism by their short names.
    job:                 None: without SLURM.
    outcome:             "completed", "stopped" or "failed"; None: it runs, or was killed. why: of a failure.
    requeued:            whether its job asked to be queued again.
    """

    command: str = ""
    time: str = ""
    host: str = ""
    from_step: Count = 0
    to_step: Count | None = None
    layout: Layout = field(default_factory=dict)
    job: RestartJob | None = None
    outcome: str | None = None
    why: str | None = None
    requeued: bool = False


@dataclass(frozen=True)
class Restarted(Record):
    """`run.json` where only its attempts count."""

    attempts: Listed[Restart]


@dataclass(frozen=True, kw_only=True)
class RunFile(Record):
    """`run.json`. seal: shows who wrote it (launch/trust.py); empty: it shows nothing."""

    model: str
    overrides: Listed[str]
    device: str
    layout: Layout
    numerics: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any]
    identity_hash: Hash
    notes: dict[str, Any] = field(default_factory=dict)
    attempts: Listed[Restart]
    seal: str = ""


@dataclass(frozen=True)
class CertifiedRun(Record):
    """`run.json` in a certificate."""

    model: str
    identity_hash: Hash


@dataclass(frozen=True)
class Train(Record):
    """The section `train` of a configuration."""

    train_iters: Count


@dataclass(frozen=True)
class Config(Record):
    """`config.yaml`, as far as it is read without Bridge."""

    train: Train


@dataclass(frozen=True, kw_only=True)
class ProgressLine(Record):
    """A line of `progress.jsonl`. Numbers may be NaN or infinite.

    loss, grad_norm: null: the step was skipped.
    seconds:         of the step. time: its end, in seconds since 1970.
    peak_memory:     the most bytes allocated on the last rank's GPU so far; 0: not measured, as on a CPU.
    peak_reserved:   likewise, of those that PyTorch holds.
    flops:           of the steps before this one, by Megatron's count of the model's operations.
    """

    step: Count
    loss: float | None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: Count
    seconds: float
    peak_memory: Count = 0
    peak_reserved: Count = 0
    flops: float = 0.0
    time: float | None = None


@dataclass(frozen=True)
class Reason(Record):
    """`rank-N.error.json`: why a rank failed. time: seconds since 1970. user_error: it raised a TpiError."""

    rank: Count
    time: Seconds
    kind: str
    message: str
    user_error: bool
    errno: Integer | None


Environment = dict[str, str]
Versions = Mapping[str, str | Integer | float | bool | None]
