# SPDX-License-Identifier: Apache-2.0
"""The contents of a ledger: its header, and the record of a step. `lines.py` has their text."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.digests import Parameter, Traced, check_digests
from tp_invariant_recipes.reading import Count, Integer, Keys, Layout, Listed, Record

SCHEMA = 3
KIND = "tpi-ledger"  # distinguishes a ledger from other files of JSON lines

IDENTITY = "identity"
# The parts of a header that may differ between comparable runs; a comparison only mentions them.
INFORMATIVE = ("numerics", "layout", "versions", "device", "environment", "notes")
# The values of a step that the ledger records as exact bits.
FLOATS = ("loss", "grad_norm", "learning_rate")
COUNTS = {"step": 1, "samples": 0, "tokens": 0}  # count -> its smallest value
# The tensors of a step that the ledger records as digests, in the order of execution -> the parameters that have them.
DIGESTED: dict[str, Callable[[Parameter], bool]] = {
    "gradients": lambda parameter: parameter.gradient is not None,
    "clipped": lambda parameter: parameter.gradient is not None,
    "moments": lambda parameter: parameter.gradient is not None,
    "masters": lambda parameter: parameter.master is not None,
    "weights": lambda parameter: not parameter.follows,
}
# The kinds of losses without training that a step may have, in the order of execution: its validation, and what follows
# the end of training. "validation/8:16" is the name of the loss of the sequences 8 to 15.
EVALUATED = VALIDATION, FINAL_VALIDATION, TEST = "validation", "final_validation", "test"
_COUNT = r"(0|[1-9]\d{0,17})"  # a number has one text, so that no two names mean the same sequences
_EVALUATION = re.compile(rf"({'|'.join(EVALUATED)})/{_COUNT}:{_COUNT}", re.ASCII)
CAPABILITY = "instructions"  # in `device` of a run on a CPU: with what its libraries compute (machine/processor.py)
COPIES = "copies"  # in `diverged`: weights that are not their master weights rounded
DIRECTIONS = ("forward", "backward")
MOST = 2**70  # of a count; the text and the sum of larger ones have no bound
# Of the identity: D, C and, of models with experts, X of the invariant numerics. Stock runs have none, and are
# comparable with runs of any.
SHARDS = DATA_SHARDS, CONTEXT_SHARDS, EXPERT_GROUPS = (
    "numerics.data_shards",
    "numerics.context_shards",
    "numerics.expert_groups",
)

Scalar = str | Integer | float | bool | None


@dataclass(frozen=True)
class NumericsKeys(Record):
    """The keys of a header's `numerics` that comparisons read."""

    mode: str = ""


@dataclass(frozen=True)
class DeviceKeys(Record):
    """The keys of a header's `device` that comparisons read."""

    name: str = ""
    product: str = ""


@dataclass(frozen=True)
class Resumed(Record):
    """A change by a resume. changed: dotted field of the header → its value after step `after_step`."""

    after_step: Count
    changed: dict[str, Any]


@dataclass(frozen=True)
class NotesKeys(Record):
    """The keys of a header's `notes` that comparisons read."""

    resumed: Listed[Resumed] = ()


@dataclass(frozen=True, kw_only=True)
class Header(Record):
    """The description of a run. Runs are comparable when `identity` is equal; the other parts are informative.

    Every part is JSON and is kept as JSON gives it back (tuples become lists, keys are sorted), so a header equals
    itself read from disk. ValueError or TypeError: a part is not JSON, or `identity` is empty or not flat.

    schema: the version of the format
    identity: model, data, optimizer and seed as flat keys such as `"model.num_layers": 36`
    numerics: mode, virtual shards …
    layout: degrees of parallelism by their short names
    versions: versions of the packages that compute
    device: name and compute capability, a CPU's `instructions`, attention backend,
        [definition of a GEMM](numerics.md#how-is-a-gemm-defined)
    environment: the variables that numerics depend on
    notes: other facts, such as the tokenizer's convention; `resumed`: what each resume has changed
    parameters: the tensors that have digests, in the digests' order: `name` as in Megatron's distributed checkpoints,
        `shape` of the whole tensor, dtypes of `gradient`, `weight` and `master` (absent or null: none)
    initial: digests of the weights before the first step; null: none
    """

    schema: int = SCHEMA
    identity: dict[str, Scalar | list[Any]]
    numerics: Annotated[dict[str, Any], Keys(NumericsKeys)] = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)
    versions: Mapping[str, Scalar] = field(default_factory=dict)
    device: Annotated[dict[str, Any], Keys(DeviceKeys)] = field(default_factory=dict)
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    notes: Annotated[dict[str, Any], Keys(NotesKeys)] = field(default_factory=dict)
    parameters: Listed[Parameter] = ()
    initial: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in (IDENTITY, *INFORMATIVE):
            part = json.loads(canonical(getattr(self, name)))
            if not isinstance(part, dict):
                raise ValueError(f"{name} is not an object of keys and values")
            object.__setattr__(self, name, part)
        if not self.identity:
            raise ValueError("identity is empty: any two runs would pass for comparable")
        nested = [key for key, value in self.identity.items() if isinstance(value, dict)]
        if nested:
            raise ValueError(f"identity must be flat, with dotted keys; nested: {', '.join(nested)}")
        if len(set(self.names)) != len(self.names):
            raise ValueError("a parameter appears twice")
        check_digests((self.initial or {}).values())

    def digested(self, kind: str) -> list[str]:
        """Names of the parameters that have digests of `kind`, a key of DIGESTED, in order."""
        return [p.name for p in self.parameters if DIGESTED[kind](p)]

    @property
    def names(self) -> list[str]:
        """Names of all parameters, in order."""
        return [p.name for p in self.parameters]

    @property
    def identity_hash(self) -> str:
        """sha256, in hexadecimal, of the canonical JSON of `identity`."""
        return hashlib.sha256(canonical(self.identity).encode()).hexdigest()


@dataclass(frozen=True)
class StepRecord:
    """The results of one step. No field may vary between identical runs: no time, host or process.

    In Python the floats are bits as text, such as "f32:40c7b717", and digests are parameter → digest, of moments
    "exp_avg/PARAMETER" → digest. A kind of digest is None where it was not recorded at this step.

    ValueError: a count is negative or not an integer, a float is not bits as text, or a step that was not skipped
    has no loss or gradient norm.

    step: completed steps, with this one
    samples: samples since the start of training, with this step's
    tokens: tokens in this step
    loss: `bits`: width and IEEE 754 pattern in hexadecimal, the only part that is compared, so -0.0 is not 0.0;
        `value`: for people. Null of a skipped step
    grad_norm: as `loss`; the norm of all gradients before clipping
    learning_rate: as `loss`
    skipped: whether the optimizer skipped the step
    gradients: digests of the reduced gradients before clipping: `parameters`, in the header's order; `groups`, one per
        layer and per module outside layers; `model`, one of all
    clipped: of the gradients as the optimizer has read them; `"gradients"`: they equal `gradients`
    moments: of the optimizer's `exp_avg`, `exp_avg_sq`, `momentum_buffer`, `step` after the step; null for a
        parameter that lacks it
    masters: of the fp32 master weights after the step
    weights: of the weights after the step, except those that are their master weights rounded
    diverged: replicas of one tensor with different bits: `of` (a key above, `"forward"`, `"backward"`; `"copies"`:
        weights that are not their master weights rounded), `parameter` (or `exp_avg/PARAMETER`, `MODULE/output`),
        `ranks` grouped by equal bits, as `[[0, 2], [1]]`
    trace: traced tensors in the order of execution: direction, module, tensor, dtype, shape, digest
    evaluations: losses after the step, as `loss`: `validation/8:16` of the sequences 8 to 15 of the validation data;
        after training also `final_validation/…` and `test/…`
    """

    step: int
    samples: int
    tokens: int
    loss: str | None
    grad_norm: str | None
    learning_rate: str
    skipped: bool = False
    gradients: Mapping[str, str] | None = None
    clipped: Mapping[str, str] | None = None
    moments: Mapping[str, str] | None = None
    masters: Mapping[str, str] | None = None
    weights: Mapping[str, str] | None = None
    diverged: tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...] = ()
    trace: tuple[Traced, ...] | None = None
    evaluations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST:
                raise ValueError(f"{name} is {value!r}, not an integer of at least {least} and at most {MOST}")
        if type(self.skipped) is not bool:
            raise ValueError(f"skipped is {self.skipped!r}, not true or false")
        for name in FLOATS:
            value = getattr(self, name)
            if value is not None:
                check_bits(name, value)
            elif not self.skipped or name == "learning_rate":
                raise ValueError(f"{name} is missing, and only a skipped step may lack its loss or gradient norm")
        for name, bits in self.evaluations.items():
            if not _EVALUATION.fullmatch(name):
                raise ValueError(f"evaluations: {name!r:.100} is not a name such as validation/8:16")
            check_bits(f"evaluations: {name}", bits)
        for kind in DIGESTED:
            check_digests((getattr(self, kind) or {}).values())


@dataclass(frozen=True)
class HeaderDifference:
    """A differing header field: its dotted name, and both values as JSON text (None: not set)."""

    field: str
    a: str | None
    b: str | None


def fingerprint_differences(a: Header, b: Header) -> tuple[HeaderDifference, ...]:
    """Return the fields that make two runs incomparable. A run without shards is comparable with any."""
    differences = _differences(a.identity, b.identity, prefix="")
    if all(any(key in header.identity for key in SHARDS) for header in (a, b)):
        return differences
    return tuple(difference for difference in differences if difference.field not in SHARDS)


def informative_differences(a: Header, b: Header) -> tuple[HeaderDifference, ...]:
    """Return the fields that may differ between comparable runs, named "layout.tp" and so on, in header order."""
    parts = (_differences(getattr(a, name), getattr(b, name), prefix=f"{name}.") for name in INFORMATIVE)
    return tuple(difference for part in parts for difference in part)


def _differences(a: dict, b: dict, prefix: str) -> tuple[HeaderDifference, ...]:
    # Compare text, as the hash does: in Python 1, 1.0 and True are equal.
    pairs = ((key, *(canonical(part[key]) if key in part else None for part in (a, b))) for key in sorted(a | b))
    return tuple(HeaderDifference(prefix + key, in_a, in_b) for key, in_a, in_b in pairs if in_a != in_b)


def canonical(value: object) -> str:
    """Return the canonical JSON: sorted keys, no spaces, ASCII. ValueError or TypeError: it is not JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def check_bits(name: str, text: Any) -> None:
    """ValueError, which names the value: the text does not state bits."""
    try:
        bits_float(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
