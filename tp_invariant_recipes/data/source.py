"""Scan a source: select its files, digest them, cut them into parts."""

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

from tp_invariant_recipes.errors import DataError, reason

# Suffix -> kind of file: "text" is one document a file, "jsonl" one document a line. All also with .gz.
KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex", ".org"), "text"),
    **dict.fromkeys((".html", ".htm", ".xml", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".sql"), "text"),
    **dict.fromkeys((".py", ".pyi", ".sh", ".js", ".ts", ".java", ".go", ".rs", ".rb", ".lua"), "text"),
    **dict.fromkeys((".c", ".h", ".cc", ".hh", ".cpp", ".hpp", ".cxx", ".cu", ".cuh", ".f90", ".s"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
}
COMPRESSED = ".gz"

# The index stores lengths as int32. The limit is half of that, because the check of a long line
# measures only the bytes beyond one part.
MAX_DOCUMENT_BYTES = 2**30

# Exceptions of reading a file: the system's, and those of a damaged .gz (BadGzipFile is an OSError).
READ_ERRORS = (OSError, EOFError, zlib.error)


@dataclass(frozen=True)
class SourceFile:
    """One file of the source. name: relative to the source, '/' between parts; never an absolute path."""

    name: str
    path: Path
    kind: str
    compressed: bool

    def open(self) -> BufferedIOBase:
        """Return the content as bytes, decompressed."""
        return gzip.open(self.path) if self.compressed else self.path.open("rb")


@dataclass(frozen=True)
class Segment:
    """Consecutive whole documents of one file: a whole text file, or some lines of a JSONL file.

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
    """Consecutive segments that are tokenized and saved together."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Bytes of decompressed content."""
        return sum(segment.size for segment in self.segments)

    def key(self, *context: str) -> str:
        """64 hex digits of this part's content and of `context` (schema version, tokenizer, JSON key)."""
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
    """Return the source's name without the suffixes of its format: corpus.jsonl.gz -> corpus."""
    name = Path(os.path.abspath(source)).name
    if source.is_dir():
        return name
    name = name.removesuffix(COMPRESSED)
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in KINDS else name


def scan(source: Path, part_bytes: int) -> Corpus:
    """Read everything once: digest the content and cut it into parts of `part_bytes` or a little more.

    Raises DataError with the list of unreadable paths, or when no file has a known suffix.
    """
    problems: list[str] = []
    files = _find(source, problems)
    digests: list[tuple[str, int, str]] = []
    segments: list[Segment] = []
    for file in files:
        whole, scanned = hashlib.sha256(), len(segments)
        try:
            segments += _segments(file, part_bytes, whole)
        except (*READ_ERRORS, DataError) as error:
            problems.append(f"{file.path}: {reason(error)}")
            continue
        digests.append((file.name, sum(segment.size for segment in segments[scanned:]), whole.hexdigest()))
    if problems:
        raise DataError("\n".join(["cannot read the source:", *problems]))
    if not files:
        raise DataError(f"{source}: no file to read; known suffixes are {_suffixes()}")
    has_jsonl = any(file.kind == "jsonl" for file in files)
    return Corpus(source_name(source), tuple(digests), tuple(_parts(segments, part_bytes)), has_jsonl)


def _find(source: Path, problems: list[str]) -> list[SourceFile]:
    """Return the files of known suffixes, sorted by relative name, without hidden files and folders.

    The walk does not follow symbolic links to folders, which may form cycles.
    """
    try:
        mode = source.stat().st_mode
    except OSError as error:
        problems.append(f"{source}: {reason(error)}")
        return []
    if not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            problems.append(f"{source}: neither a file nor a folder")
            return []
        file = _source_file(source, source.name)
        if file is None:
            problems.append(f"{source}: unknown suffix; known suffixes are {_suffixes()}")
        return [file] if file else []

    def unreadable(error: OSError) -> None:
        problems.append(f"{error.filename}: {reason(error)}")

    files = []
    for folder, folders, names in os.walk(source, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            file = None if name.startswith(".") else _source_file(path, path.relative_to(source).as_posix())
            # Keep broken links: opening reports them. Skip pipes and sockets: reading them would block.
            if file and (path.is_file() or not path.exists()):
                files.append(file)
    return sorted(files, key=lambda file: file.name)


def _source_file(path: Path, name: str) -> SourceFile | None:
    """None when the suffix is not in the table."""
    plain = name.lower().removesuffix(COMPRESSED)
    kind = KINDS.get(os.path.splitext(plain)[1])
    return SourceFile(name, path, kind, plain != name.lower()) if kind else None


def _segments(file: SourceFile, part_bytes: int, whole: "hashlib._Hash") -> Iterator[Segment]:
    """Cut a file at ends of documents: a segment of a JSONL file is `part_bytes` and the rest of the last line.

    Feeds the content to `whole`. Raises READ_ERRORS, or DataError for a document that is too long.
    """
    offset, line = 0, 1
    with file.open() as stream:
        while data := stream.read(MAX_DOCUMENT_BYTES + 1 if file.kind == "text" else part_bytes):
            rest = b"" if file.kind == "text" else stream.readline(MAX_DOCUMENT_BYTES + 1)
            if len(data if file.kind == "text" else rest) > MAX_DOCUMENT_BYTES:
                raise DataError(f"a document of more than {MAX_DOCUMENT_BYTES} bytes; split it")
            data += rest
            whole.update(data)
            yield Segment(file, offset, len(data), line, hashlib.sha256(data).hexdigest())
            offset += len(data)
            line += data.count(b"\n")


def _parts(segments: Iterable[Segment], part_bytes: int) -> Iterator[TextBatch]:
    """Group small segments into parts of at least `part_bytes`."""
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
    return f"{' '.join(KINDS)} (each also with {COMPRESSED} appended)"
