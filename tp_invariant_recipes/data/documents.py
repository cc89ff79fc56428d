"""The documents of a part, as UTF-8 bytes. Problems are collected in a list, not raised one by one."""

import hashlib
import json
from collections.abc import Iterator
from io import BufferedIOBase

from tp_invariant_recipes.data.source import READ_ERRORS, Segment, SourceFile, TextBatch
from tp_invariant_recipes.errors import DataError, reason


class SegmentReader:
    """Reads segments in source order. It keeps the last file open, since a reopened .gz seeks from its start."""

    def __init__(self) -> None:
        self._file: SourceFile | None = None
        self._stream: BufferedIOBase | None = None

    def read(self, segment: Segment) -> bytes:
        """Return the segment's bytes. Raises DataError when the file has changed since the scan."""
        try:
            if self._stream is None or self._file != segment.file:
                self.close()
                self._file, self._stream = segment.file, segment.file.open()
            self._stream.seek(segment.offset)
            data = self._stream.read(segment.size)
        except READ_ERRORS as error:
            raise DataError(f"cannot read {segment.file.path}: {reason(error)}") from error
        if hashlib.sha256(data).hexdigest() != segment.sha256:
            raise DataError(f"{segment.file.path} changed while it was being prepared; run again when it is complete")
        return data

    def close(self) -> None:
        """Close the open file, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def documents(reader: SegmentReader, part: TextBatch, json_key: str, problems: list[str]) -> Iterator[bytes]:
    """Yield the part's documents in order, without the empty ones: a lone end-of-document token teaches nothing.

    problems: gets one line, with file and position, for each unusable document.
    Raises DataError when a file cannot be read or has changed since the scan.
    """
    for segment in part.segments:
        read = _text if segment.file.kind == "text" else _jsonl
        yield from read(segment, reader.read(segment), json_key, problems)


def _text(segment: Segment, data: bytes, _json_key: str, problems: list[str]) -> Iterator[bytes]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        problems.append(f"{segment.file.path}: not UTF-8 at byte {error.start} ({error.reason})")
        return
    if data:
        yield data


def _jsonl(segment: Segment, data: bytes, json_key: str, problems: list[str]) -> Iterator[bytes]:
    """Skip blank lines. Line numbers start at 1 and byte offsets at 0, both within the file."""
    offset = segment.offset
    for number, line in enumerate(data.split(b"\n"), segment.line):
        try:
            text = _text_of(line, json_key)
        except UnicodeDecodeError as error:
            where = f"line {number}: not UTF-8 at byte {offset + error.start} of the file"
            problems.append(f"{segment.file.path}, {where} ({error.reason})")
        except DataError as error:
            problems.append(f"{segment.file.path}, line {number}: {error}")
        else:
            if text:
                yield text
        offset += len(line) + 1


def _text_of(line: bytes, json_key: str) -> bytes:
    """Return the text of a JSONL line, empty for a blank one.

    Raises UnicodeDecodeError, or DataError without the position.
    """
    string = line.decode()
    if not string.strip():
        return b""
    try:
        record = json.loads(string)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise DataError(f"{_json_type(record)} instead of an object")
    if json_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"no key {json_key!r} (--json-key, data.json_key); this line has {keys}")
    if not isinstance(record[json_key], str):
        raise DataError(f"{json_key!r} holds {_json_type(record[json_key])} instead of a string")
    try:
        return record[json_key].encode()
    except UnicodeEncodeError as error:
        # "\ud800" is valid JSON for half a character.
        raise DataError(f"{json_key!r} holds half a character (an unpaired surrogate) at {error.start}") from error


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
