# SPDX-License-Identifier: Apache-2.0
"""The order of execution within a step: one row for each recorded number or set of tensors."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tp_invariant_recipes.ledger.digests import Traced
from tp_invariant_recipes.ledger.schema import COPIES, DIGESTED, EVALUATED, FLOATS, StepRecord

FIELD, REPLICAS, MODEL, INITIAL = "field", "replicas", "model", "initial"  # kinds of difference besides Tensors


@dataclass(frozen=True)
class Field:
    """A field of a step record: its name there, its name for people, the phase of the step that computes it."""

    name: str
    label: str
    phase: str

    @property
    def is_float(self) -> bool:
        """Whether the record holds bits as text (or None), not a count or a boolean."""
        return self.name in FLOATS


_RECORDED_AS = {"forward": "trace", "backward": "trace", COPIES: "masters"} | dict.fromkeys(EVALUATED, "evaluations")


@dataclass(frozen=True)
class Tensors:
    """A step's tensors with digests, or losses of evaluations: their kind, and the phase that computes them."""

    kind: str
    phase: str

    @property
    def record(self) -> str:
        """The field of a step record that holds their digests; for copies, those that they follow from."""
        return _RECORDED_AS.get(self.kind, self.kind)


# In the order of execution: the first difference is the nearest to the cause.
SEQUENCE: tuple[Field | Tensors, ...] = (
    Field("samples", "consumed samples", "data"),
    Field("tokens", "tokens", "data"),
    Tensors("forward", "forward"),
    Field("loss", "loss", "loss"),
    Tensors("backward", "backward"),
    Tensors("gradients", "gradient"),
    Field("grad_norm", "gradient norm", "norm"),
    Field("skipped", "skipped", "update"),
    Field("learning_rate", "learning rate", "update"),
    Tensors("clipped", "update"),
    Tensors("moments", "update"),
    Tensors("masters", "update"),
    Tensors(COPIES, "update"),
    Tensors("weights", "update"),
    *(Tensors(data, "evaluation") for data in EVALUATED),
)
FIELDS = tuple(part for part in SEQUENCE if isinstance(part, Field))
RECORDS = (*FLOATS, *DIGESTED, "trace")  # what a step record may lack
# Kind of digest -> kinds beside which a run always records it; otherwise a run chooses its steps (ledger.digests).
BESIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "gradients": (("clipped",),),
    "clipped": (("gradients", "moments"),),
    "moments": (("clipped",),),
    "masters": (("gradients",), ("moments",)),
    "weights": (("gradients",), ("moments",)),
}
BACKWARD = ("gradients", "clipped")  # kinds of which the last parameter of the forward pass comes first


@dataclass(frozen=True)
class ValueDifference:
    """One value that differs.

    phase: "model", "initial", or a phase of the step: "data", "forward", "loss", "backward", "gradient", "norm",
          "update", "evaluation".
    kind: "field", "forward", "backward", a key of DIGESTED, "replicas", "copies", "model", "initial" or of EVALUATED.
    name: of the field; of the tensor, such as "forward/decoder.layers.3.mlp/output", "gradients/PARAMETER" or
          "moments/exp_avg/PARAMETER"; for "model" and "initial", of the parameter; such as "validation/8:16".
    a, b: as in the records: bits or digests as text, counts. For replicas, the ranks that agree, such as "0, 2 | 1";
          None: all agree. For copies, the ranks with weights that are not their master weights rounded. For a model,
          its property, such as "shape [512, 128]"; None: no such parameter.
    """

    phase: str
    kind: str
    name: str
    a: str | int | bool | None
    b: str | int | bool | None


def is_float(kind: str, name: str) -> bool:
    """Whether values of this kind and name (as in `ValueDifference`) are bits as text, or None."""
    return kind in EVALUATED or (kind == FIELD and name in FLOATS)


def differences(
    a: StepRecord, b: StepRecord, parameters: Sequence[str], *, repetition: bool = False
) -> Iterator[ValueDifference]:
    """All differences in a step, in the order of execution. parameters: the compared ones, in forward order.

    repetition: `b` repeats `a`. Replicas may disagree, if they do so alike wherever both runs compared them.
    """
    for part in SEQUENCE:
        if isinstance(part, Field):
            # Floats are compared as text: a NaN equals itself, and the two zeros differ.
            in_a, in_b = getattr(a, part.name), getattr(b, part.name)
            if in_a != in_b and not _alone(part, a, b):
                yield ValueDifference(part.phase, FIELD, part.name, in_a, in_b)
        elif a.diverged or b.diverged or _unlike(getattr(a, part.record), getattr(b, part.record)):
            yield from _tensors(part, a, b, parameters, repetition)


def unmatched(a: StepRecord, b: StepRecord) -> Iterator[tuple[str, bool]]:
    """Yield what only one run recorded of a step where the other should have it: its name, and whether `a` has it.

    A kind of digest that one run did not record at this step is none, unless BESIDE says that it always does.
    """
    yield from ((field.name, getattr(b, field.name) is None) for field in FIELDS if _alone(field, a, b))
    for kind in DIGESTED:
        in_a, in_b = getattr(a, kind), getattr(b, kind)
        if in_a is not None and in_b is not None:
            if in_a.keys() != in_b.keys():
                yield from ((f"{kind}/{name}", name in in_a) for name in sorted(in_a.keys() ^ in_b.keys()))
        elif in_a is not in_b:
            lacking = a if in_a is None else b
            if any(all(getattr(lacking, field) is not None for field in kinds) for kinds in BESIDE.get(kind, ())):
                yield kind, in_b is None


def untraced(a: StepRecord, b: StepRecord, placed: bool) -> Iterator[tuple[str, bool]]:
    """Yield what only one run traced of a step that both traced: its name, and whether `a` has it.

    placed: a digest that only one run has counts too; in two layouts, other tensors have a place in the whole model.
    """
    if a.trace is None or b.trace is None or a.trace == b.trace:
        return
    for direction in ("forward", "backward"):
        in_a, in_b = traced(a.trace, direction), traced(b.trace, direction)
        for name in in_a | in_b:
            if name not in in_a or name not in in_b:
                yield name, name in in_a
            elif placed and (in_a[name].digest is None) != (in_b[name].digest is None):
                yield name, in_b[name].digest is None


def _alone(field: Field, a: StepRecord, b: StepRecord) -> bool:
    """Whether only one run has the field, although both or neither skipped the step."""
    return a.skipped == b.skipped and (getattr(a, field.name) is None) != (getattr(b, field.name) is None)


def differing(a: StepRecord, b: StepRecord, kind: str, parameters: Sequence[str]) -> list[str]:
    """Return the names of parameters whose tensors of a kind differ, in the order of execution; there may be many."""
    in_a, in_b = getattr(a, kind), getattr(b, kind)
    if not _unlike(in_a, in_b):
        return []
    wrong = {parameter_of(kind, name) for name in in_a if _unlike(in_a[name], in_b.get(name))}
    order = reversed(parameters) if kind in BACKWARD else parameters
    return [name for name in order if name in wrong]


def parameter_of(kind: str, name: str) -> str:
    """Return the parameter of a digest, which among moments is named "exp_avg/PARAMETER"."""
    return name.partition("/")[2] if kind == "moments" else name


def tensors(record: StepRecord, kind: str, parameters: Sequence[str]) -> dict[str, Traced] | dict[str, str]:
    """Name -> entry of the trace, digest or loss, in the order of execution. Empty: not recorded at this step."""
    if kind in ("forward", "backward"):
        return traced(record.trace or (), kind)
    if kind in EVALUATED:
        return {name: loss for name, loss in record.evaluations.items() if name.startswith(f"{kind}/")}
    digests: Mapping[str, str] = (getattr(record, kind) if kind in DIGESTED else None) or {}
    order = reversed(parameters) if kind in BACKWARD else parameters
    states = [f"{state}/" for state in dict.fromkeys(name.partition("/")[0] for name in digests)]
    names = (state + name for name in order for state in (states if kind == "moments" else ("",)))
    return {f"{kind}/{name}": digests[name] for name in names if name in digests}


def traced(trace: Sequence[Traced], direction: str) -> dict[str, Traced]:
    """Return the trace of one direction by name; of a module's second call " #2" follows the module."""
    seen: Counter[str] = Counter()
    entries = {}
    for entry in trace:
        if entry.direction == direction:
            key = f"{entry.module}/{entry.tensor}"
            seen[key] += 1
            call = f" #{seen[key]}" if seen[key] > 1 else ""
            entries[f"{direction}/{entry.module}{call}/{entry.tensor}"] = entry
    return entries


def digest(value: Traced | str | None) -> str | None:
    """Return the digest of a value of `tensors`. None: it has none."""
    return value.digest if isinstance(value, Traced) else value


def _unlike(a: object, b: object) -> bool:
    return a is not None and b is not None and a != b


def _otherwise_unlike(a: Traced | str | None, b: Traced | str | None) -> bool:
    """Whether two entries of traces have other dtypes, or other shapes. Without a digest an entry has no shape."""
    if not isinstance(a, Traced) or not isinstance(b, Traced):
        return False
    return a.dtype != b.dtype or (None not in (a.digest, b.digest) and a.shape != b.shape)


def _tensors(
    part: Tensors, a: StepRecord, b: StepRecord, parameters: Sequence[str], repetition: bool
) -> Iterator[ValueDifference]:
    in_a, in_b = (tensors(record, part.kind, parameters) for record in (a, b))
    disagreeing = [_diverged(record, part.kind) for record in (a, b)]
    # Ranks compare the replicas of tensors that they digest, and of no others.
    compared = all(getattr(record, part.record) is not None for record in (a, b))
    # No ledger of ours has a diverged parameter that neither run lists, but such a parameter must be reported.
    for name in dict.fromkeys([*in_a, *in_b, *disagreeing[0], *disagreeing[1]]):
        value, other = (ranks.get(name) for ranks in disagreeing)
        if (compared and value != other) if repetition else (value or other):
            yield ValueDifference(part.phase, COPIES if part.kind == COPIES else REPLICAS, name, value, other)
        value, other = digest(in_a.get(name)), digest(in_b.get(name))
        if _unlike(value, other) or _otherwise_unlike(in_a.get(name), in_b.get(name)):
            yield ValueDifference(part.phase, part.kind, name, value, other)


def _diverged(record: StepRecord, kind: str) -> dict[str, str]:
    """Name of a tensor -> its ranks in groups of equal replicas, as text; of several parts or calls, all of them."""
    groups: dict[str, list[str]] = {}
    for diverging, name, ranks in record.diverged:
        if diverging == kind:
            groups.setdefault(f"{kind}/{name}", []).append(" | ".join(", ".join(map(str, group)) for group in ranks))
    return {name: "; ".join(texts) for name, texts in groups.items()}
