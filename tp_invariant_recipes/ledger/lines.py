# SPDX-License-Identifier: Apache-2.0
"""The text of a ledger's two kinds of line, header and step."""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tp_invariant_recipes.ledger.bits import described, readable
from tp_invariant_recipes.ledger.digests import NAME, Traced, check_digests, summaries
from tp_invariant_recipes.ledger.schema import (
    COPIES,
    COUNTS,
    DIGESTED,
    DIRECTIONS,
    FLOATS,
    IDENTITY,
    INFORMATIVE,
    KIND,
    MOST,
    SCHEMA,
    Header,
    StepRecord,
    check_bits,
)
from tp_invariant_recipes.reading import checked, parse_object

_SAME = "gradients"  # for the clipped gradients: as before clipping
_DIVERGING = (*DIGESTED, COPIES, *DIRECTIONS)  # what may diverge
_STATES = 16  # at most, of a parameter's tensors in the optimizer


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
    record["diverged"] = tuple(map(_decode_diverged, _required(raw, "diverged", list) if "diverged" in raw else ()))
    if "trace" in raw:
        record["trace"] = tuple(map(_decode_traced, _required(raw, "trace", list)))
    if "evaluations" in raw:
        losses = _required(raw, "evaluations", dict)
        record["evaluations"] = {name: _decode_float(name, loss) for name, loss in losses.items()}
    return StepRecord(**record)


def _name(raw: object) -> str:
    if not isinstance(raw, str) or not _is_name(raw):
        raise ValueError(f"{raw!r:.100} is not the name of a tensor, a module or a type")
    return raw


@functools.lru_cache(maxsize=1 << 16)  # the same names at every step
def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


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
        names = header.digested(kind)
        states = {
            _state(state): _decode_digests(kind, _required(digests, state, dict), names, partial=True)
            for state in digests
        }
        return {f"{state}/{name}": text for state, texts in states.items() for name, text in texts.items()}
    return _decode_digests(kind, digests, header.digested(kind))


def _state(name: str) -> str:
    if "/" in _name(name):
        raise ValueError(f"moments: {name!r:.100} is not the name of a tensor in an optimizer")
    return name


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


def _decode_diverged(raw: object) -> tuple[str, str, tuple[tuple[int, ...], ...]]:
    if not isinstance(raw, dict):
        raise ValueError("diverged: not an object")
    wrong = "diverged: ranks are not lists of numbers of ranks"
    ranks = tuple(_counts(group, wrong) for group in _required(raw, "ranks", list))
    if not all(ranks) or not ranks:
        raise ValueError("diverged: no ranks, so that the ranks that disagree are unknown")
    kind = _required(raw, "of", str)
    if kind not in _DIVERGING:
        raise ValueError(f"diverged: {kind!r} is not one of {', '.join(_DIVERGING)}")
    return kind, _name(_required(raw, "parameter")), ranks


def _decode_traced(raw: object) -> Traced:
    if not isinstance(raw, list) or len(raw) != len(fields(Traced)):
        raise ValueError("trace: an entry is not a list of direction, module, tensor, dtype, shape and digest")
    direction, module, tensor, dtype, shape, digest = raw
    sizes = _counts(shape, f"{shape!r} is not a shape")
    return Traced(_name(direction), _name(module), _name(tensor), _name(dtype), sizes, digest)


def _counts(raw: object, wrong: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(count) is int and 0 <= count <= MOST for count in raw):
        raise ValueError(wrong)
    return tuple(raw)


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
