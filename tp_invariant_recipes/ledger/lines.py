# SPDX-License-Identifier: Apache-2.0
"""The text of a ledger's two kinds of line, header and step."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from tp_invariant_recipes.ledger.bits import described, readable
from tp_invariant_recipes.ledger.digests import Name, Shape, Traced, check_digests, summaries
from tp_invariant_recipes.ledger.schema import (
    COPIES,
    COUNTS,
    DIGESTED,
    DIRECTIONS,
    FLOATS,
    IDENTITY,
    INFORMATIVE,
    KIND,
    SCHEMA,
    Header,
    StepRecord,
    check_bits,
)
from tp_invariant_recipes.reading import Bounds, Count, Listed, Record, checked, parse_object

_SAME = "gradients"  # for the clipped gradients: as before clipping
_STATES = 16  # at most, of a parameter's tensors in the optimizer
_PART = re.compile(r"[!-.0-~]{1,1024}")  # of a name, between slashes


def _one_of(words: Sequence[str]) -> Bounds:
    return Bounds(pattern=f"^({'|'.join(words)})$")


_Ranks = Annotated[tuple[Count, ...], Bounds(strict=False, min_length=1)]
# Direction, module, tensor, dtype, shape, digest.
_TracedRow = Annotated[
    tuple[
        Annotated[str, _one_of(DIRECTIONS)],
        Name,
        Annotated[str, Bounds(pattern=f"^{_PART.pattern}$")],
        Name,
        Shape,
        Annotated[str, Bounds(pattern="^[0-9a-f]{32}$")] | None,
    ],
    Bounds(strict=False),
]


@dataclass(frozen=True)
class _Diverged(Record):
    """Of what kind the tensor is whose replicas disagree, its name, and the ranks that agree."""

    of: Annotated[str, _one_of((*DIGESTED, COPIES, *DIRECTIONS))]
    parameter: Name
    ranks: Annotated[tuple[_Ranks, ...], Bounds(strict=False, min_length=1)]


@dataclass(frozen=True)
class _Tensors(Record):
    """What the line of a step says of tensors beside their digests."""

    diverged: Listed[_Diverged] = ()
    trace: Listed[_TracedRow] = ()


def encode_header(header: Header) -> bytes:
    """Return the first line of a ledger, with its newline."""
    parts = {name: getattr(header, name) for name in (IDENTITY, *INFORMATIVE)}
    start = {"kind": KIND, "schema": header.schema, "identity_hash": header.identity_hash}
    listed = [{n: v for n, v in p.as_json().items() if n != "master" or v is not None} for p in header.parameters]
    end: dict[str, Any] = {"parameters": listed, "initial": None}
    if header.initial is not None:
        end["initial"] = _encode_digests(header.initial, header.names)
    return _line(start | parts | end)


def decode_header(line: bytes) -> Header:
    """Read a first line. ValueError: it is not a ledger's, its schema is unknown, or it was altered."""
    try:
        raw = parse_object(line)
    except ValueError:
        raw = {}
    if raw.get("kind") != KIND:
        raise ValueError("not a ledger")
    for part in fields(Header):
        _required(raw, part.name)
    if raw["schema"] != SCHEMA:
        raise ValueError(f"schema {raw['schema']!r} is not known to this version, which reads schema {SCHEMA}")
    header = checked(Header, raw | {"initial": None})
    if raw["initial"] is not None:
        header = replace(header, initial=_decode_digests("initial", _required(raw, "initial", dict), header.names))
    if _required(raw, "identity_hash") != header.identity_hash:
        raise ValueError("identity_hash does not belong to this identity: the header was altered")
    return header


def encode_step(record: StepRecord, header: Header) -> bytes:
    """Return the line of a step; equal records give equal bytes. ValueError: digests of other parameters."""
    raw: dict[str, Any] = {name: getattr(record, name) for name in (*COUNTS, *FLOATS, "skipped")}
    raw |= {name: described(raw[name]) for name in FLOATS}
    for kind in DIGESTED:
        if (digests := getattr(record, kind)) is not None:
            raw[kind] = _encode_kind(kind, digests, record, header)
    if record.diverged:
        raw["diverged"] = [{"of": kind, "parameter": name, "ranks": ranks} for kind, name, ranks in record.diverged]
    if record.trace is not None:
        raw["trace"] = [[t.direction, t.module, t.tensor, t.dtype, t.shape, t.digest] for t in record.trace]
    if record.evaluations:  # the last key: a later evaluation lengthens the line (`LedgerWriter.add`)
        raw["evaluations"] = {name: described(bits) for name, bits in record.evaluations.items()}
    return _line(raw)


def decode_step(line: bytes, header: Header) -> StepRecord:
    """Read the line of a step, ignoring keys that this version does not know. ValueError: the line is invalid."""
    raw = parse_object(line)
    record: dict[str, Any] = {name: _required(raw, name) for name in (*COUNTS, *FLOATS, "skipped")}
    for name in FLOATS:
        if record[name] is not None:
            record[name] = _decode_float(name, record[name])
    for kind in DIGESTED:
        if kind in raw:
            record[kind] = _decode_kind(kind, raw, record, header)
    if "diverged" in raw or "trace" in raw:
        tensors = checked(_Tensors, raw)
        record["diverged"] = tuple((entry.of, entry.parameter, entry.ranks) for entry in tensors.diverged)
        record["trace"] = tuple(Traced(*row) for row in tensors.trace) if "trace" in raw else None
    if "evaluations" in raw:
        losses = _required(raw, "evaluations", dict)
        record["evaluations"] = {name: _decode_float(name, loss) for name, loss in losses.items()}
    return StepRecord(**record)


def _line(raw: dict) -> bytes:
    return (json.dumps(raw, allow_nan=False) + "\n").encode()


def _encode_kind(kind: str, digests: Mapping[str, str], record: StepRecord, header: Header) -> dict | str:
    if kind == "clipped" and digests == record.gradients:
        return _SAME
    if kind == "moments":
        states = {name.partition("/")[0]: None for name in digests}
        return {state: _encode_state(digests, state, header.digested(kind)) for state in states}
    return _encode_digests(digests, header.digested(kind))


def _decode_kind(kind: str, raw: dict, record: dict[str, Any], header: Header) -> dict[str, str]:
    if kind == "clipped" and raw[kind] == _SAME:
        if "gradients" not in record:
            raise ValueError("clipped: as gradients, and the step has none")
        return record["gradients"]
    digests = _required(raw, kind, dict)
    if kind == "moments":
        if len(digests) > _STATES:
            raise ValueError(f"moments: {len(digests)} tensors of a parameter, and an optimizer has at most {_STATES}")
        if wrong := [state for state in digests if not _PART.fullmatch(state)]:
            raise ValueError(f"moments: {wrong[0]!r:.100} is not the name of a tensor in an optimizer")
        names = header.digested(kind)
        states = {s: _decode_digests(kind, _required(digests, s, dict), names, partial=True) for s in digests}
        return {f"{state}/{name}": text for state, texts in states.items() for name, text in texts.items()}
    return _decode_digests(kind, digests, header.digested(kind))


def _encode_digests(digests: Mapping[str, str], names: Sequence[str]) -> dict:
    if set(digests) != set(names):
        raise ValueError(f"digests of other parameters than the header's: {sorted(set(digests) ^ set(names))[:3]}")
    texts = [digests[name] for name in names]
    model, groups = summaries(tuple(names), texts)
    return {"model": model, "groups": groups, "parameters": texts}


def _encode_state(digests: Mapping[str, str], state: str, names: Sequence[str]) -> dict:
    """As `_encode_digests`, of a state of the optimizer, with null for the parameters that have none."""
    start = f"{state}/"
    own = {name.removeprefix(start): digest for name, digest in digests.items() if name.startswith(start)}
    encoded = _encode_digests(own, [name for name in names if name in own])
    return encoded | {"parameters": [own.get(name) for name in names]}


def _decode_digests(kind: str, raw: dict, names: Sequence[str], *, partial: bool = False) -> dict[str, str]:
    """partial: null stands for the parameters that have none."""
    texts = listed = _required(raw, "parameters", list)
    if len(texts) != len(names):
        raise ValueError(f"{kind}: {len(texts)} digests of {len(names)} parameters")
    if partial:
        there = [text is not None for text in listed]
        texts, names = list(itertools.compress(listed, there)), list(itertools.compress(names, there))
    check_digests(texts)
    model, groups = summaries(tuple(names), texts)
    if raw != {"model": model, "groups": groups, "parameters": listed}:
        raise ValueError(f"{kind}: group or model do not belong to the parameters: the line was altered")
    return dict(zip(names, texts, strict=True))


def _decode_float(name: str, raw: object) -> str:
    if not isinstance(raw, dict) or not {"bits", "value"} <= raw.keys():
        raise ValueError(f"{name} is not an object of bits and value")
    check_bits(name, raw["bits"])
    # repr, because == takes the two zeros as equal
    if repr(raw["value"]) != repr(readable(raw["bits"])):
        raise ValueError(f"{name}: value {raw['value']!r} does not belong to bits {raw['bits']}: the line was altered")
    return raw["bits"]


def _required(raw: dict, name: str, kind: type = object) -> Any:
    if name not in raw:
        raise ValueError(f"{name} is missing")
    if not isinstance(raw[name], kind):
        raise ValueError(f"{name} is not a {kind.__name__}")
    return raw[name]
