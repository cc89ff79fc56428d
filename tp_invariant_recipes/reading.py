# SPDX-License-Identifier: Apache-2.0
"""Files that come from elsewhere: read up to a limit, parsed strictly, and checked against a type.

    data = read_limited(file, MiB)              OSError, ValueError: more bytes than that
    for number, line in read_lines(file):       OSError, ValueError: a line is too long
    value = parse_json(data)                    ValueError: not JSON, nested too deeply, half a character, …
    row = parse_object(line)                    ValueError: as `parse_json`, or it is no object
    run = checked(RunFile, value)               ValueError: "attempts.0.from_step: Input should be a valid integer"

A file's format is one frozen dataclass, a `Record`: `checked` reads it, and `as_json` is what is written.

A file of a run directory, a certificate or a matrix may be damaged or forged. Whoever reads one catches OSError and
ValueError and nothing else, and raises its own TpiError that names the file; the message of a ValueError is one line.

pydantic and yaml are imported where they are used: `tpi --help` and completion use neither.
"""

import codecs
import errno
import functools
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, TypeVar, overload

from tp_invariant_recipes.text import abbreviated

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MIB = 1 << 20
DEPTH = 64  # of nested lists and objects; our own files have at most 10
NODES = 1_000_000  # values in a file or a line, with those that an alias repeats; parsed, each takes up to 300 bytes
TOKENS = 1 << 23  # values in a line of a sequence's tokens, each with some of an engine's choices
LONGEST_LINE = 64 * MIB  # of a file of JSON lines; a step of 22,000 parameters has 7 MB
_PROBLEMS = 3  # named in one message
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # an escaped surrogate: half a character, if the other half is missing


# Fields whose key in files is an older word.
KEYS = {"detector": "found_by", "omitted": "left_out", "separate_experts": "experts_apart"}

T = TypeVar("T")


def key_of(name: str) -> str:
    """Return the key of a field in files."""
    return KEYS.get(name, name.removesuffix("_"))


class Record:
    """Base of the frozen dataclasses that `checked` makes from a mapping.

    No value is converted to the type of its field, and unknown keys are ignored. `key_of` names the key of a field:
    `pass` of a field `pass_`.
    """

    __pydantic_config__: ClassVar = {"strict": True, "alias_generator": key_of}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(source) | {"strict": False}  # a strict dataclass takes instances alone; its fields stay strict

    def as_json(self) -> dict[str, Any]:
        """Return the mapping that `checked` reads, in the order of the fields."""
        return {key_of(name): value for name, value in asdict(self).items()}  # type: ignore[call-overload]


class Bounds:
    """`pydantic.Field(…)` with these limits; it imports pydantic only when a value is checked."""

    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(**self.limits)])


class Keys:
    """A mapping that stays as it is; those of its keys that a `Record` has are of the record's types."""

    def __init__(self, kind: type[Record]) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def unchanged(value: Any, read: Any) -> Any:
            read(value)
            return value

        return core_schema.no_info_wrap_validator_function(unchanged, handler.generate_schema(self.kind))


# Integers that fit in 64 bits: arithmetic on larger ones, and their text, has no bound.
Integer = Annotated[int, Bounds(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Bounds(ge=0, lt=2**63)]
Seconds = Annotated[float, Bounds(ge=0, lt=2**40)]  # also of a time since 1970
Hash = Annotated[str, Bounds(pattern=r"^[0-9a-f]{64}$")]  # sha256
Layout = dict[str, Integer | bool]
Listed = Annotated[tuple[T, ...], Bounds(strict=False)]  # a list of the file


def open_file(file: Path) -> BufferedReader:
    """Open a file for reading, at once. OSError: as `open`, or it is a FIFO, a device or a socket.

    Those would wait for another process or never end. A pipe that the shell hands over is read: `<(zcat …)`.
    """
    return open(file, "rb", opener=_without_waiting)


def _without_waiting(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    kind = os.fstat(descriptor).st_mode
    handed_over = stat.S_ISFIFO(kind) and name.startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or handed_over):  # of a directory, `open` says so itself
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"a {'FIFO' if stat.S_ISFIFO(kind) else 'device'}, not a file", name)
    os.set_blocking(descriptor, True)
    return descriptor


class Appended:
    """What others append to a file, which need not exist yet. One that was replaced or cut begins anew."""

    def __init__(self, file: Path, *, skip: bool = False) -> None:
        """skip: pass over what it has now."""
        self.file, self._inode, self._position = file, 0, 0
        if skip and file.exists():
            status = file.stat()
            self._inode, self._position = status.st_ino, status.st_size

    def read(self, *, lines: bool) -> bytes:
        """Return what is new since the last call. lines: leave a line without an end for later. Raises OSError."""
        try:
            stream = open_file(self.file)
        except FileNotFoundError:
            return b""
        with stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:
                self._position = 0
            stream.seek(self._position)
            data = stream.read()
        new = data[: data.rfind(b"\n") + 1] if lines else data
        self._inode, self._position = status.st_ino, self._position + len(new)
        return new


def read_limited(file: Path, limit: int) -> bytes:
    """Return the bytes of a file. OSError: it cannot be read. ValueError: it has more than `limit` bytes.

    The size is checked before anything is read, and again while reading, since a pipe has no size and a file may grow.
    """
    with open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(size) if size <= limit else b""
        rest, total = [], max(size, len(data))
        while total <= limit and (block := stream.read(MIB)):
            rest.append(block)
            total += len(block)
    if total > limit:
        raise ValueError(f"it has more than {limit} bytes, the most that a file of its kind may have")
    return b"".join([data, *rest]) if rest else data


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1 on. OSError: it cannot be read.

    ValueError: a line is too long.
    """
    with open_file(file) as stream:
        yield from lines_of(stream)


def lines_of(stream: BinaryIO | GzipFile) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a stream as `read_lines` does."""
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"line {number} has more than {LONGEST_LINE} bytes")
        yield number, line


def parse_object(data: bytes, *, constants: bool = False, most: int = NODES) -> dict[str, Any]:
    """Return a JSON object. ValueError: as `parse_json`, or it is another value."""
    value = parse_json(data, constants=constants, most=most)
    if not isinstance(value, dict):
        raise ValueError("not an object in braces")
    return value


def parse_json(data: bytes, *, constants: bool = False, most: int = NODES) -> Any:
    """Return a JSON value. ValueError: it is none, repeats a key, is nested deeper than DEPTH, or has half a character.

    Nor may it have more than `most` values, which its commas and brackets bound before anything is parsed.

    constants: whether NaN and Infinity are allowed, which JSON lacks and Python writes.
    """
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it begins with a byte order mark; save the file as UTF-8 without one")
    if len(data) > most and sum(data.count(mark) for mark in b",[{") > most:
        raise ValueError(f"more than {most} values")
    try:
        value = (_WITH_CONSTANTS if constants else _STRICT).decode(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Both walks are slow, and few lines of a ledger have so many brackets or an escape.
    if data.count(b"[") + data.count(b"{") > DEPTH or _HALF.search(data):
        _walk(value)
    return value


def parse_yaml(data: bytes) -> Any:
    """Return a YAML value of plain types. ValueError: as `parse_json`, or aliases make it endless or huge."""
    import yaml

    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(data, Loader=loader):  # libyaml's constructor would crash where nesting is deep
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH:
                raise ValueError("nested too deeply")
        value = yaml.load(data, Loader=loader)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (AttributeError, KeyError, OverflowError, TypeError) as error:  # its constructors of numbers and dates
        raise ValueError(f"not YAML: {type(error).__name__}") from error
    _walk(value, most=NODES)
    return value


@overload
def checked[K](kind: type[K], value: Any) -> K: ...
@overload
def checked(kind: Any, value: Any) -> Any: ...


def checked(kind: Any, value: Any) -> Any:
    """Return the value as this type. kind: a `Record`, a list of them, or another type that pydantic checks.

    ValueError: it is not of this type, strictly; the message names up to three fields.
    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        named = [_words(_place(problem["loc"]), problem["type"], problem["msg"]) for problem in problems]
        raise ValueError(abbreviated(named, _PROBLEMS, "; ")) from None


@functools.cache
def _adapter(kind: Any) -> "TypeAdapter":
    from pydantic import TypeAdapter

    return TypeAdapter(kind, config=None if is_dataclass(kind) else {"strict": True})


# Type of a problem -> what a file should have there; pydantic names the class of Python.
_EXPECTED = {
    "dataclass_type": "Input should be a valid dictionary",
    "tuple_type": "Input should be a valid list",
}


def _words(place: str, kind: str, message: str) -> str:
    if kind == "missing":
        return f"{place} is missing"
    message = _EXPECTED.get(kind, message.removeprefix("Value error, "))
    return f"{place}: {message}" if place else message


def _place(location: tuple[int | str, ...]) -> str:
    """Return the dotted name of a field, fit for a message whatever a forger calls it."""
    return "".join(c if c.isprintable() else "?" for c in ".".join(map(str, location))[:200])


def _walk(value: Any, most: int | None = None) -> None:
    """ValueError: nested deeper than DEPTH, more than `most` values, or text with half a character."""
    level, count = [value], 0
    for depth in range(DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not _is_text(item):
                    raise ValueError("text with half a character (a lone surrogate)")
            elif depth == DEPTH and isinstance(item, dict | list | tuple | set):
                raise ValueError("nested too deeply")
            elif isinstance(item, dict):
                inner += item
                inner += item.values()
            elif isinstance(item, list | tuple | set):
                inner += item
            if most is not None and count + len(inner) > most:
                raise ValueError(f"more than {most} values")
        if not inner:
            return
        count += len(inner)
        level = inner


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unique(pairs: list[tuple[str, object]]) -> dict:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key appears twice")
    return unique


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


# Made once: `json.loads` with these arguments makes one a call, and a list reads tens of thousands of files.
_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_WITH_CONSTANTS = json.JSONDecoder(object_pairs_hook=_unique)
