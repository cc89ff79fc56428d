"""What to read: which files count, their digests, and how they are cut in parts."""

import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from tp_invariant_recipes.errors import DataError

# Suffix -> how a file is read: "text" is a document a file, "jsonl" a document a line. Also with .gz.
KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex", ".org"), "text"),
    **dict.fromkeys((".html", ".htm", ".xml", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".sql"), "text"),
    **dict.fromkeys((".py", ".pyi", ".sh", ".js", ".ts", ".java", ".go", ".rs", ".rb", ".lua"), "text"),
    **dict.fromkeys((".c", ".h", ".cc", ".hh", ".cpp", ".hpp", ".cxx", ".cu", ".cuh", ".f90", ".s"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
}
COMPRESSED = ".gz"

# The index stores lengths as int32. Half of that: of a long line, only what exceeds a part is measured.
MAX_DOCUMENT_BYTES = 2**30

# What reading a file can raise: the system's errors, and those of a damaged .gz (BadGzipFile is an OSError).
READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class SourceFile:
    """One file of the source. name: relative to the source, '/' between parts; never an absolute path."""

    name: str
    path: Path
    kind: str
    compressed: bool

    def open(self) -> BufferedIOBase:
        """The content as bytes, decompressed."""
        return gzip.open(self.path) if self.compressed else self.path.open("rb")


@dataclass(frozen=True)
class Segment:
    """A run of whole documents in one file: all of a text file, or some lines of a JSONL file.

    offset, size: bytes of decompressed content; line: number of the first line, from 1;
    sha256: hex, of these bytes.
    """

    file: SourceFile
    offset: int
    size: int
    line: int
    sha256: str


@dataclass(frozen=True)
class TextBatch:
    """Consecutive segments that are tokenized, and saved, in one go."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Bytes of decompressed content."""
        return sum(segment.size for segment in self.segments)

    def key(self, *context: str) -> str:
        """64 hex digits that name this part's content, read as `context` says (tokenizer, JSON key)."""
        return sha256_of([context, [(segment.file.kind, segment.sha256) for segment in self.segments]])


@dataclass(frozen=True)
class Corpus:
    """A scanned source.

    files: (relative name, bytes, sha256 hex) of the decompressed content, in reading order.
    """

    name: str
    files: tuple[tuple[str, int, str], ...]
    parts: tuple[TextBatch, ...]
    has_jsonl: bool

    @property
    def size(self) -> int:
        """Bytes of decompressed content."""
        return sum(size for _, size, _ in self.files)

    @property
    def sha256(self) -> str:
        """Hex digest over the names and contents of all files."""
        return sha256_of([[name, sha256] for name, _, sha256 in self.files])


def sha256_of(value: object) -> str:
    """Hex digest of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def source_name(source: Path) -> str:
    """The source's own name without the suffixes that only say how to read it: corpus.jsonl.gz -> corpus."""
    name = Path(os.path.abspath(source)).name
    if source.is_dir():
        return name
    name = name.removesuffix(COMPRESSED)
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in KINDS else name


def scan(source: Path, part_bytes: int) -> Corpus:
    """Read everything once: digest the content and cut it in parts of `part_bytes` or a little more.

    Raises DataError listing every path that cannot be read, or when no file counts.
    """
    problems: list[str] = []
    files = _find(source, problems)
    digests: list[tuple[str, int, str]] = []
    segments: list[Segment] = []
    for file in files:
        whole, found = hashlib.sha256(), len(segments)
        try:
            segments += _segments(file, part_bytes, whole)
        except (*READ_ERRORS, DataError) as error:
            problems.append(f"{file.path}: {reason(error)}")
            continue
        digests.append((file.name, sum(segment.size for segment in segments[found:]), whole.hexdigest()))
    if problems:
        raise DataError("\n".join(["cannot read the source:", *problems]))
    if not files:
        raise DataError(f"{source}: no file to read; files count when they end in {_suffixes()}")
    has_jsonl = any(file.kind == "jsonl" for file in files)
    return Corpus(source_name(source), tuple(digests), tuple(_parts(segments, part_bytes)), has_jsonl)


def _find(source: Path, problems: list[str]) -> list[SourceFile]:
    """The files that count, sorted by relative name. Hidden files and folders do not count.

    Folders that are symbolic links are not entered: they may lead in circles.
    """
    try:
        is_folder = stat.S_ISDIR(source.stat().st_mode)
    except OSError as error:
        problems.append(f"{source}: {reason(error)}")
        return []
    if not is_folder:
        file = _source_file(source, source.name)
        if file is None:
            problems.append(f"{source}: do not know how to read it; known suffixes are {_suffixes()}")
        return [file] if file else []

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: {reason(error)}")

    files = []
    for folder, folders, names in os.walk(source, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            file = None if name.startswith(".") else _source_file(path, path.relative_to(source).as_posix())
            # Broken links are kept, to be reported when opened; pipes and sockets would block.
            if file and (path.is_file() or path.is_symlink()):
                files.append(file)
    return sorted(files, key=lambda file: file.name)


def _source_file(path: Path, name: str) -> SourceFile | None:
    """None where the suffix is not in the table."""
    plain = name.lower().removesuffix(COMPRESSED)
    kind = KINDS.get(os.path.splitext(plain)[1])
    return SourceFile(name, path, kind, plain != name.lower()) if kind else None


def _segments(file: SourceFile, part_bytes: int, whole: "hashlib._Hash") -> Iterator[Segment]:
    """Cut a file where documents end: a segment of a JSONL file has `part_bytes`, and the rest of that line.

    Feeds the content to `whole`. Raises READ_ERRORS, or DataError for a document that is too long.
    """
    offset, line = 0, 1
    with file.open() as stream:
        while data := stream.read(MAX_DOCUMENT_BYTES + 1 if file.kind == "text" else part_bytes):
            rest = b"" if file.kind == "text" else stream.readline(MAX_DOCUMENT_BYTES + 1)
            if len(data if file.kind == "text" else rest) > MAX_DOCUMENT_BYTES:
                raise DataError(f"a document of more than {MAX_DOCUMENT_BYTES} bytes; cut it in several")
            data += rest
            whole.update(data)
            yield Segment(file, offset, len(data), line, hashlib.sha256(data).hexdigest())
            offset += len(data)
            line += data.count(b"\n")


def _parts(segments: Iterable[Segment], part_bytes: int) -> Iterator[TextBatch]:
    """Group small segments until `part_bytes` are reached."""
    group: list[Segment] = []
    size = 0
    for segment in segments:
        group.append(segment)
        size += segment.size
        if size >= part_bytes:
            yield TextBatch(tuple(group))
            group, size = [], 0
    if group:
        yield TextBatch(tuple(group))


def _suffixes() -> str:
    return f"{' '.join(KINDS)} (also with {COMPRESSED} behind it)"


def reason(error: BaseException) -> str:
    """A system error without the path, which the caller prints already."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
