"""The two kinds of line of a ledger, header and step record, and their text."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, NotRequired, TypedDict

from tp_invariant_recipes.ledger.bits import bits_float, readable
from tp_invariant_recipes.ledger.digests import (
    Parameter,
    Traced,
    check_digest,
    check_digests,
    summaries,
)
from tp_invariant_recipes.reading import Bounds, Count, Hash, Integer, Layout, checked, parse_json

SCHEMA = 3
KIND = "tpi-ledger"  # distinguishes a ledger from other files of JSON lines

IDENTITY = "identity"
# The parts of a header that may differ between comparable runs; a comparison only mentions them.
INFORMATIVE = ("numerics", "layout", "versions", "device", "environment", "notes")
# The values of a step that the ledger records as exact bits.
FLOATS = ("loss", "grad_norm", "learning_rate")
_COUNTS = {"step": 1, "samples": 0, "tokens": 0}  # count -> its smallest value
# The tensors of a step that the ledger records as digests, in the order of execution -> the parameters that have them.
DIGESTED: dict[str, Callable[[Parameter], bool]] = {
    "gradients": lambda parameter: parameter.gradient is not None,
    "clipped": lambda parameter: parameter.gradient is not None,
    "moments": lambda parameter: parameter.gradient is not None,
    "masters": lambda parameter: parameter.master is not None,
    "weights": lambda parameter: not parameter.follows,
}
COPIES = "copies"  # in `diverged`: weights that are not their master weights rounded
_SAME = "gradients"  # for the clipped gradients: as before clipping
_DIRECTIONS = ("forward", "backward")
_OF = (*DIGESTED, COPIES, *_DIRECTIONS)  # what may diverge
_STATES = 16  # at most, of a parameter's tensors in the optimizer
_MOST = 2**70  # of a count; the text and the sum of larger ones have no bound
_NAME = re.compile(
    r"[!-~]{1,1024}"
)  # of a parameter, a module or a tensor: no space, and nothing that a terminal obeys

Name = Annotated[str, Bounds(pattern=rf"^{_NAME.pattern}$")]
Scalar = str | Integer | float | bool | None


class _ParameterLine(TypedDict):
    name: Name
    shape: Annotated[list[Count], Bounds(max_length=32)]
    gradient: Name | None
    weight: Name
    master: NotRequired[Name | None]


# Of the identity: D and C of the invariant numerics. Stock runs have none, and are comparable with runs of any.
SHARDS = DATA_SHARDS, CONTEXT_SHARDS = "numerics.data_shards", "numerics.context_shards"


class _Resumed(TypedDict):
    after_step: Count
    changed: dict[str, Any]


class _Numerics(TypedDict):
    mode: NotRequired[str]


class _Device(TypedDict):
    name: NotRequired[str]
    product: NotRequired[str]


class _Notes(TypedDict):
    resumed: NotRequired[list[_Resumed]]


class _HeaderLine(TypedDict):
    """The types of a header as JSON; `Header` checks what its parts mean."""

    identity_hash: Hash
    identity: dict[str, Scalar | list[Any]]
    numerics: _Numerics
    layout: Layout
    versions: dict[str, Scalar]
    device: _Device
    environment: dict[str, Scalar]
    notes: _Notes
    parameters: list[_ParameterLine]
    initial: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Header:
    """The description of a run. Runs are comparable when `identity` is equal; the other parts are informative.

    Every part is JSON and is kept as JSON gives it back (tuples become lists, keys are sorted), so a header equals
    itself read from disk. ValueError or TypeError: a part is not JSON, `identity` is empty or not flat, or the schema
    is another.
    """

    schema: int = SCHEMA
    identity: dict  # dotted key → scalar or list, as "model.num_layers": 36, "rng.seed": 1234
    numerics: dict = field(default_factory=dict)  # mode, virtual_shards …
    layout: dict = field(default_factory=dict)  # tp, pp, dp …
    versions: dict = field(default_factory=dict)
    device: dict = field(default_factory=dict)  # names, compute capability
    environment: dict = field(default_factory=dict)  # the variables that numerics depend on
    notes: dict = field(default_factory=dict)  # noteworthy facts, such as the tokenizer's convention
    parameters: tuple[Parameter, ...] = ()  # the tensors of a step's digests, in their order; empty: no digests
    initial: Mapping[str, str] | None = None  # digests of the weights before the first step; None: not recorded

    def __post_init__(self) -> None:
        if type(self.schema) is not int or self.schema != SCHEMA:
            raise ValueError(f"schema {self.schema!r} is not known to this version, which reads schema {SCHEMA}")
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

    ValueError: a count is negative or not an integer, a float is not bits as text, or a step that was not skipped
    has no loss or gradient norm.
    """

    step: int  # completed steps, including this one
    samples: int  # consumed since the start of training, including this step
    tokens: int  # in this step
    loss: str | None  # bits, as all three floats; None: a skipped step has none
    grad_norm: str | None
    learning_rate: str
    skipped: bool = False
    gradients: Mapping[str, str] | None = None  # parameter -> digest, before clipping; None: not recorded at this step
    clipped: Mapping[str, str] | None = None  # the same after clipping, as the optimizer has read them
    moments: Mapping[str, str] | None = None  # "exp_avg/PARAMETER" -> digest of the optimizer's state, after the step
    masters: Mapping[str, str] | None = None  # fp32 master weights, after the step
    weights: Mapping[str, str] | None = None  # the model's own weights, after the step; mostly of those without master
    # Disagreeing replicas: a key of DIGESTED or a direction, the tensor, and ranks grouped by equal values:
    # [[0, 2], [1]]. "copies": weights of a parameter that are not its master weights rounded, and [the ranks].
    diverged: tuple[tuple[str, str, tuple[tuple[int, ...], ...]], ...] = ()
    trace: tuple[Traced, ...] | None = None  # in the order of execution; None: not a traced step

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MOST:
                raise ValueError(f"{name} is {value!r}, not an integer of at least {least} and at most {_MOST}")
        if type(self.skipped) is not bool:
            raise ValueError(f"skipped is {self.skipped!r}, not true or false")
        for name in FLOATS:
            value = getattr(self, name)
            if value is not None:
                _check_bits(name, value)
            elif not self.skipped or name == "learning_rate":
                raise ValueError(f"{name} is missing, and only a skipped step may lack its loss or gradient norm")
        for kind in DIGESTED:
            check_digests((getattr(self, kind) or {}).values())
        for traced in self.trace or ():
            if traced.direction not in _DIRECTIONS:
                raise ValueError(f"trace: {traced.direction!r} is not a direction: forward or backward")
            if traced.digest is not None:
                check_digest(traced.digest)


@dataclass(frozen=True)
class HeaderDifference:
    """A differing header field: its dotted name, and both values as JSON text (None: not set)."""

    field: str
    a: str | None
    b: str | None


def identity_differences(a: Header, b: Header) -> tuple[HeaderDifference, ...]:
    """The fields that make two runs incomparable.

    Equal identity hashes have none. Otherwise there are some, but for shards of which one run has none.
    """
    found = _differences(a.identity, b.identity, prefix="")
    return tuple(one for one in found if not (one.field in SHARDS and None in (one.a, one.b)))


def informative_differences(a: Header, b: Header) -> tuple[HeaderDifference, ...]:
    """The fields that may differ between comparable runs, named "layout.tp" and so on, in header order."""
    parts = (_differences(getattr(a, name), getattr(b, name), prefix=f"{name}.") for name in INFORMATIVE)
    return tuple(difference for part in parts for difference in part)


def _differences(a: dict, b: dict, prefix: str) -> tuple[HeaderDifference, ...]:
    # Compare text, as the hash does: in Python 1, 1.0 and True are equal.
    pairs = ((key, *(canonical(part[key]) if key in part else None for part in (a, b))) for key in sorted(a | b))
    return tuple(HeaderDifference(prefix + key, left, right) for key, left, right in pairs if left != right)


def canonical(value: object) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, ASCII. ValueError or TypeError: it is not JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def encode_header(header: Header) -> bytes:
    """The first line of a ledger, with its newline."""
    parts = {name: getattr(header, name) for name in (IDENTITY, *INFORMATIVE)}
    start = {"kind": KIND, "schema": header.schema, "identity_hash": header.identity_hash}
    end: dict[str, Any] = {"parameters": list(map(_encode_parameter, header.parameters)), "initial": None}
    if header.initial is not None:
        end["initial"] = _encode_digests(header.initial, header.names)
    return _line(start | parts | end)


def decode_header(line: bytes) -> Header:
    """Read a first line. ValueError: it is not a ledger's, its schema is unknown, or it was altered."""
    try:
        raw = load(line)
    except ValueError:
        raw = {}
    if raw.get("kind") != KIND:
        raise ValueError("not a ledger")
    if raw.get("schema") == SCHEMA:  # Header refuses another one
        checked(_HeaderLine, raw)
        raw["parameters"] = tuple(map(_parameter, _required(raw, "parameters", list)))
        if _required(raw, "initial") is not None:
            names = [parameter.name for parameter in raw["parameters"]]
            raw["initial"] = _decode_digests("initial", _required(raw, "initial", dict), names)
    parts: dict[str, Any] = {name.name: _required(raw, name.name) for name in fields(Header)}
    header = Header(**parts)
    if _required(raw, "identity_hash") != header.identity_hash:
        raise ValueError("identity_hash does not belong to this identity: the header was altered")
    return header


def encode_step(record: StepRecord, header: Header) -> bytes:
    """The line of a step, with its newline; equal records give equal bytes.

    ValueError: its digests do not match the header's parameters.
    """
    raw: dict[str, Any] = {name: getattr(record, name) for name in (*_COUNTS, *FLOATS, "skipped")}
    for name in FLOATS:
        if raw[name] is not None:
            raw[name] = {"bits": raw[name], "value": readable(raw[name])}
    for kind in DIGESTED:
        if (digests := getattr(record, kind)) is not None:
            raw[kind] = _encode_kind(kind, digests, record, header)
    if record.diverged:
        raw["diverged"] = [{"of": of, "parameter": name, "ranks": ranks} for of, name, ranks in record.diverged]
    if record.trace is not None:
        raw["trace"] = [[t.direction, t.module, t.tensor, t.dtype, t.shape, t.digest] for t in record.trace]
    return _line(raw)


def decode_step(line: bytes, header: Header) -> StepRecord:
    """Read the line of a step, ignoring keys that this version does not know. ValueError: the line is invalid."""
    raw = load(line)
    record: dict[str, Any] = {name: _required(raw, name) for name in (*_COUNTS, *FLOATS, "skipped")}
    for name in FLOATS:
        if record[name] is not None:
            record[name] = _decode_float(name, record[name])
    for kind in DIGESTED:
        if kind in raw:
            record[kind] = _decode_kind(kind, raw, record, header)
    record["diverged"] = tuple(map(_decode_diverged, _required(raw, "diverged", list) if "diverged" in raw else ()))
    if "trace" in raw:
        record["trace"] = tuple(map(_decode_traced, _required(raw, "trace", list)))
    return StepRecord(**record)


def _name(raw: object) -> str:
    if not isinstance(raw, str) or not _is_name(raw):
        raise ValueError(f"{raw!r:.100} is not the name of a tensor, a module or a type")
    return raw


@functools.lru_cache(maxsize=1 << 16)  # the same names at every step
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _line(raw: dict) -> bytes:
    return (json.dumps(raw, allow_nan=False) + "\n").encode()


def _encode_kind(kind: str, digests: Mapping[str, str], record: StepRecord, header: Header) -> dict | str:
    if kind == "clipped" and digests == record.gradients:
        return _SAME
    if kind == "moments":
        states = {name.partition("/")[0]: None for name in digests}
        return {state: _encode_some(_of_state(digests, state), header.digested(kind)) for state in states}
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
        states = {_state(state): _decode_some(kind, _required(digests, state, dict), names) for state in digests}
        return {f"{state}/{name}": text for state, texts in states.items() for name, text in texts.items()}
    return _decode_digests(kind, digests, header.digested(kind))


def _of_state(digests: Mapping[str, str], state: str) -> dict[str, str]:
    start = f"{state}/"
    return {name.removeprefix(start): digest for name, digest in digests.items() if name.startswith(start)}


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


def _encode_some(digests: Mapping[str, str], names: Sequence[str]) -> dict:
    """As `_encode_digests`, with null for the parameters that have none."""
    some = _encode_digests(digests, [name for name in names if name in digests])
    return some | {"parameters": [digests.get(name) for name in names]}


def _decode_some(kind: str, raw: dict, names: Sequence[str]) -> dict[str, str]:
    texts = _required(raw, "parameters", list)
    if len(texts) != len(names):
        raise ValueError(f"{kind}: {len(texts)} digests of {len(names)} parameters")
    there = [text is not None for text in texts]
    some = raw | {"parameters": list(itertools.compress(texts, there))}
    return _decode_digests(kind, some, list(itertools.compress(names, there)))


def _decode_digests(kind: str, raw: dict, names: Sequence[str]) -> dict[str, str]:
    texts = _required(raw, "parameters", list)
    if len(texts) != len(names):
        raise ValueError(f"{kind}: {len(texts)} digests of {len(names)} parameters")
    check_digests(texts)
    model, groups = summaries(tuple(names), texts)
    if raw != {"model": model, "groups": groups, "parameters": texts}:
        raise ValueError(f"{kind}: group or model do not belong to the parameters: the line was altered")
    return dict(zip(names, texts, strict=True))


def _encode_parameter(parameter: Parameter) -> dict[str, Any]:
    return {name: value for name, value in asdict(parameter).items() if name != "master" or value is not None}


def _parameter(raw: object) -> Parameter:
    if not isinstance(raw, dict):
        raise ValueError("parameters: not an object")
    optional = {"master": None}
    values = {name.name: _required(optional | raw, name.name) for name in fields(Parameter)}
    return Parameter(**values | {"shape": _shape(values["shape"])})


def _decode_diverged(raw: object) -> tuple[str, str, tuple[tuple[int, ...], ...]]:
    if not isinstance(raw, dict):
        raise ValueError("diverged: not an object")
    ranks = tuple(map(_ranks, _required(raw, "ranks", list)))
    of = _required(raw, "of", str)
    if of not in _OF:
        raise ValueError(f"diverged: {of!r} is not one of {', '.join(_OF)}")
    return of, _name(_required(raw, "parameter")), ranks


def _ranks(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(rank) is int and 0 <= rank <= _MOST for rank in raw):
        raise ValueError("diverged: ranks are not lists of numbers of ranks")
    return tuple(raw)


def _decode_traced(raw: object) -> Traced:
    if not isinstance(raw, list) or len(raw) != len(fields(Traced)):
        raise ValueError("trace: an entry is not a list of direction, module, tensor, dtype, shape and digest")
    direction, module, tensor, dtype, shape, digest = raw
    return Traced(_name(direction), _name(module), _name(tensor), _name(dtype), _shape(shape), digest)


def _shape(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(size) is int and 0 <= size <= _MOST for size in raw):
        raise ValueError(f"{raw!r} is not a shape")
    return tuple(raw)


def load(line: bytes) -> dict:
    """Read one line as a JSON object. ValueError: it is not an object, or not JSON (`reading.parse_json`)."""
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return raw


def _check_bits(name: str, text: Any) -> None:
    try:
        bits_float(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _decode_float(name: str, raw: object) -> str:
    if not isinstance(raw, dict) or not {"bits", "value"} <= raw.keys():
        raise ValueError(f"{name} is not an object of bits and value")
    _check_bits(name, raw["bits"])
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
