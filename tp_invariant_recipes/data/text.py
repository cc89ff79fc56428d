# SPDX-License-Identifier: Apache-2.0
"""Text in, Megatron's indexed dataset out: a .bin of token ids and its .idx. Megatron's own are taken as they are."""

import gzip
import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from tp_invariant_recipes.data.tokenizer import BYTE, FOLDER, identify, open_tokenizer
from tp_invariant_recipes.errors import DataError, reason
from tp_invariant_recipes.files import sync_folder, write_atomically
from tp_invariant_recipes.reading import (
    MIB,
    Count,
    Hash,
    Record,
    checked,
    lines_of,
    open_file,
    parse_json,
    parse_object,
    read_limited,
)
from tp_invariant_recipes.text import abbreviated, plural

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".bin", ".idx")  # in the order of their renames: an index makes the dataset
LINES = (".jsonl", ".ndjson")  # one document a line; of the others one document a file. All also with .gz
TEXT = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".org", ".html", ".htm", ".xml", ".csv", ".tsv", ".yaml", ".yml"),
    *(".toml", ".sql", ".py", ".pyi", ".sh", ".js", ".ts", ".java", ".go", ".rs", ".rb", ".lua", ".c", ".h", ".cc"),
    *(".hh", ".cpp", ".hpp", ".cxx", ".cu", ".cuh", ".f90", ".s"),
)
# Corpora come in these forms, too: to leave one out would train on a part.
UNREAD = (".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".feather", ".avro")
LARGEST_DOCUMENT = 2**30  # bytes; an index has lengths of 31 bits
SHOWN = 20  # problems in one message
# The .idx: magic, version, code of the ids' type, number of lengths and of ends; then int32 lengths and int64 offsets
# of the sequences, and int64 ends of the documents, counted in sequences.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

Progress = Callable[[int, int], None]  # bytes done, of how many


def _silent(done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Index(Record):
    """What a .bin and .idx hold. documents: sequences; largest: token id; digest: sha256 hex of the files' digests."""

    documents: Count
    tokens: Count
    largest: int
    digest: Hash


@dataclass(frozen=True)
class PreparedData:
    """A dataset to train on.

    prefix: path without .bin or .idx; vocab_size, eod: of its tokenizer; documents, tokens: 0 before it is made;
    source: the text that it is made of, for users; "" where they named the dataset.
    """

    prefix: Path
    vocab_size: int
    eod: int
    documents: int = 0
    tokens: int = 0
    digest: str | None = None
    source: str = ""


@dataclass(frozen=True)
class Corpus:
    """The files of a source to read, in order, and the names of those left out."""

    root: Path
    files: tuple[Path, ...]
    left: tuple[str, ...]
    size: int

    def digest(self, tokenizer: str, json_key: str) -> str:
        """Return a digest of everything that decides the token ids. Raises DataError."""
        names = [os.path.relpath(file, self.root) for file in self.files]
        content = [(name, _digest(file)[0]) for name, file in zip(names, self.files, strict=True)]
        return hashlib.sha256(json.dumps([identify(tokenizer).sha256, json_key, content]).encode()).hexdigest()

    def __str__(self) -> str:
        taken = f"{self.root}: {plural(len(self.files), 'file')}, {self.size / MIB:,.1f} MiB"
        return f"{taken}; left out: {abbreviated(self.left, 5)}" if self.left else taken


def beside(prefix: Path, suffix: str) -> Path:
    """PREFIX with a suffix appended; unlike with_suffix, it keeps the dots in the name."""
    return prefix.with_name(prefix.name + suffix)


def plain_name(source: Path) -> str:
    """Return the source's name without the suffixes of its format: corpus.jsonl.gz -> corpus."""
    name = Path(os.path.abspath(source)).name
    return (
        name if source.is_dir() or _kind(source) not in LINES + TEXT else os.path.splitext(name.removesuffix(".gz"))[0]
    )


def select(source: Path) -> Corpus:
    """Choose the files of a source, without hidden files and linked folders: where a folder has JSONL, those alone.

    Raises DataError: nothing to read, or a file that may be a part of the corpus and that tpi cannot read.
    """
    problems, found = [], [source]
    if source.is_dir():
        found = []
        for folder, folders, names in os.walk(source, onerror=lambda e: problems.append(f"{e.filename}: {reason(e)}")):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
        found.sort(key=lambda path: path.relative_to(source).as_posix())
    lines = [path for path in found if _kind(path) in LINES]
    files = lines or [path for path in found if _kind(path) in TEXT]
    left = [os.path.relpath(path, source) if path != source else path.name for path in found if path not in {*files}]
    forms = UNREAD if files and not lines else (*UNREAD, ".json")
    if not source.exists():
        problems.append("No such file or directory")
    elif unread := [name for name in left if _kind(Path(name)) in forms]:
        problems.append(f"tpi cannot read {abbreviated(unread, 5)}: make them JSONL (also .gz), or move them away")
    elif not files and not problems:
        problems.append(f"no file to read; known suffixes are {' '.join(LINES + TEXT)} (each also with .gz)")
    size = 0
    for path in files:
        try:
            with open_file(path) as stream:
                size += os.fstat(stream.fileno()).st_size
        except OSError as error:
            problems.append(f"{path}: {reason(error)}")
    if problems:
        raise DataError("\n".join([f"{source} is no text to train on:", *problems]))
    return Corpus(source, tuple(files), tuple(left), size)


def problems(path: Path, tokenizer: str) -> list[str]:
    """Why `find_prepared` finds no text or tokenizer of these names, each with its key. It reads no text."""
    found, choices = [], f"data.tokenizer={BYTE} or {FOLDER}"
    for key, find in ("data.path=", lambda: _find(path)), ("data.tokenizer: ", lambda: identify(tokenizer, choices)):
        try:
            find()
        except DataError as error:
            found.append(f"{key}{error}")
    return found


def find_prepared(
    path: Path, cache: Path, tokenizer: str = BYTE, json_key: str = "text", progress: Progress = _silent, *, make: bool
) -> PreparedData:
    """Return the dataset at prefix `path` (or its .bin or .idx), or else that of the text at `path`, kept in `cache`.

    Its name there is cache/NAME-DIGEST, so that other text or another tokenizer never finds an old one.
    make: prepare the text if it is not there. Raises DataError as `prepare` does, or for ids that the tokenizer lacks.
    """
    corpus, opened = _find(path), open_tokenizer(identify(tokenizer))
    source, prefix = "", _as_prefix(path)
    if corpus:
        source, prefix = str(corpus), cache / f"{plain_name(path)}-{corpus.digest(tokenizer, json_key)[:16]}"
        if not beside(prefix, ".idx").exists():
            if not make:
                return PreparedData(prefix, opened.vocab_size, opened.eod, source=source)
            prepare(path, prefix, tokenizer, json_key, progress)
    index = read_index(prefix, cache, progress)
    if index.largest >= opened.vocab_size:
        raise DataError(
            f"{prefix}.bin holds token {index.largest}, and data.tokenizer={tokenizer} has {opened.vocab_size} ids; "
            f"name the tokenizer that made it"
        )
    return PreparedData(prefix, opened.vocab_size, opened.eod, index.documents, index.tokens, index.digest, source)


def prepare(
    source: Path, prefix: Path, tokenizer: str = BYTE, json_key: str = "text", progress: Progress = _silent
) -> Index:
    """Turn a file or folder of text into PREFIX.bin and .idx, whole or not at all.

    tokenizer: "byte" or a local Hugging Face folder; json_key: the key of the text in a JSONL line. Two calls at once
    write the same bytes. Raises DataError: an unusable source, a full disk, or other files at PREFIX.
    """
    corpus, prefix, opened = select(source), _as_prefix(prefix), open_tokenizer(identify(tokenizer))
    progress(0, corpus.size)
    digest, folder = corpus.digest(tokenizer, json_key), None
    wrong: list[str] = []
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(prefix=f".{prefix.name}.", dir=prefix.parent))
        _write(folder / "new", opened.encode(_documents(corpus, json_key, wrong, progress)), opened.vocab_size)
        if not wrong and corpus.digest(tokenizer, json_key) != digest:
            wrong.append("it changed meanwhile; run again when it is complete")
        elif not wrong and not (folder / "new.bin").stat().st_size:
            wrong.append(f"no text in it: {plural(len(corpus.files), 'file')}, every document is empty")
        if wrong:
            raise DataError("\n".join([f"unusable text in {source}:", *wrong]))
        index = read_index(folder / "new")
        if index.tokens == index.documents:
            raise DataError(f"tokenizer {tokenizer} makes no token of the text in {source}")
        names = {beside(prefix, suffix): beside(folder / "new", suffix) for suffix in SUFFIXES}
        if other := [str(old) for old, new in names.items() if old.exists() and _digest(old) != _digest(new)]:
            raise DataError(f"{abbreviated(other, 2)}: other data is in the way; move it, or choose another --output")
        for old, new in names.items():
            os.replace(new, old)
            sync_folder(prefix.parent)
        return index
    except OSError as error:
        raise DataError(f"cannot write {prefix}: {reason(error)}") from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def read_index(prefix: Path, cache: Path | None = None, progress: Progress = _silent) -> Index:
    """Read the .bin and .idx at a prefix whole; where `cache` knows files of this size and time, not again.

    Raises DataError.
    """
    files, kept = [beside(prefix, suffix) for suffix in SUFFIXES], None
    try:
        if cache:
            state = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            kept = cache / f"index-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
            with suppress(OSError, ValueError):
                return checked(Index, parse_json(read_limited(kept, MIB)))
        documents, tokens, kind = count(prefix)
        digest, largest = _digest(files[0], kind, progress)
        both = hashlib.sha256(f"{digest} {_digest(files[1])[0]}".encode()).hexdigest()
    except OSError as error:
        raise DataError(f"{prefix}: {reason(error)}") from error
    index = Index(documents, tokens, largest, both)
    if kept:
        with suppress(OSError):  # a cache that cannot be written
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(index.as_json()))
    return index


def count(prefix: Path) -> tuple[int, int, str]:
    """Return the documents and tokens of a dataset, and numpy's name of the ids' type; reads the .idx alone.

    Raises DataError.
    """
    import numpy as np

    binary, index = (beside(prefix, suffix) for suffix in SUFFIXES)
    try:
        with open_file(index) as stream:
            magic, version, code, sequences, _ = HEADER.unpack(stream.read(HEADER.size).ljust(HEADER.size))
            lengths = np.frombuffer(stream.read(4 * min(sequences, index.stat().st_size)), "<i4")
        if (magic, version) != (MAGIC, 1) or code not in TYPES or len(lengths) != sequences:
            raise ValueError("the .idx is no index of token ids")
        tokens, size = int(lengths.sum(dtype=np.int64)), binary.stat().st_size
        if tokens * np.dtype(TYPES[code]).itemsize != size or not size:
            raise ValueError(f"the .idx tells of {tokens} tokens, and the .bin has {size} bytes")
    except (OSError, ValueError) as error:
        raise DataError(f"{prefix}.bin and .idx are no dataset of Megatron: {reason(error)}") from error
    return sequences, tokens, TYPES[code]


def _find(path: Path) -> Corpus | None:
    """Return the text at a path; None: it names a dataset. Raises DataError."""
    if path.suffix not in SUFFIXES and path.exists():
        return select(path)
    missing = [file for suffix in SUFFIXES if not (file := beside(_as_prefix(path), suffix)).is_file()]
    if missing:
        no = "no file or folder of text and no dataset has this name"
        raise DataError(f"{path}: {no if len(missing) == 2 else f'{missing[0]} is missing'}")
    return None


def _as_prefix(path: Path) -> Path:
    if path.name in ("", ".."):
        raise DataError(f"{path}: an output needs a name, as in --output data/corpus")
    return path.with_name(path.stem) if path.suffix in SUFFIXES else path


def _kind(path: Path) -> str:
    return os.path.splitext(path.name.lower().removesuffix(".gz"))[1]


def _digest(file: Path, kind: str = "u1", progress: Progress = _silent) -> tuple[str, int]:
    """Return the sha256 of a file and the largest of its numbers. Raises DataError."""
    import numpy as np

    digest, largest = hashlib.sha256(), 0
    try:
        with open_file(file) as stream:
            while block := stream.read(16 * MIB):
                digest.update(block)
                largest = max(largest, int(np.frombuffer(block, kind).max()))
                progress(stream.tell(), os.fstat(stream.fileno()).st_size)
    except OSError as error:
        raise DataError(f"{file}: {reason(error)}") from error
    return digest.hexdigest(), largest


def _write(prefix: Path, documents: "Iterator[np.ndarray]", vocab_size: int) -> None:
    """Write the .bin and .idx of documents, a sequence each."""
    import numpy as np

    code = 8 if vocab_size < 65500 else 4  # as Megatron chooses
    lengths = []
    with beside(prefix, ".bin").open("wb") as stream:
        for ids in documents:
            stream.write(ids.astype(TYPES[code]).tobytes())
            lengths.append(len(ids))
        stream.flush()
        os.fsync(stream.fileno())
    ends = np.cumsum([0, *lengths], dtype="<i8")
    offsets = ends[:-1] * np.dtype(TYPES[code]).itemsize
    head = HEADER.pack(MAGIC, 1, code, len(lengths), len(ends))
    parts = np.array(lengths, "<i4"), offsets, np.arange(len(ends), dtype="<i8")
    write_atomically(beside(prefix, ".idx"), head + b"".join(part.tobytes() for part in parts))


def _documents(corpus: Corpus, json_key: str, wrong: list[str], progress: Progress) -> Iterator[str]:
    """Yield the documents in order, but the empty ones. wrong: gets a line for each unusable one, up to SHOWN.

    After the first of those nothing is yielded, so that all are found soon.
    """
    done = 0
    for file in corpus.files:
        where, whole = str(file), _kind(file) in TEXT
        try:
            with open_file(file) as raw:
                stream = gzip.GzipFile(fileobj=raw) if file.name.lower().endswith(".gz") else raw
                for number, data in [(0, stream.read(LARGEST_DOCUMENT + 1))] if whole else lines_of(stream):
                    where = f"{file}, line {number}" if number else where
                    try:
                        text = _text_of(data, None if whole else json_key)
                    except ValueError as error:
                        wrong.append(f"{where}: {reason(error)}")
                        if len(wrong) == SHOWN:
                            wrong.append("... and maybe more")
                            return
                    else:
                        if text and not wrong:
                            yield text
                        progress(done + raw.tell(), corpus.size)
                done += raw.tell()
        except (OSError, EOFError, zlib.error, ValueError) as error:  # EOFError, zlib.error: a damaged .gz
            wrong.append(f"{file}: {reason(error)}")


def _text_of(data: bytes, json_key: str | None) -> str:
    """Return the text of a file, or of a JSONL line under a key; empty for a blank one. Raises ValueError."""
    if len(data) > LARGEST_DOCUMENT:
        raise ValueError(f"a document of more than {LARGEST_DOCUMENT} bytes; split it")
    if json_key is None or not data.strip():
        return data.decode() if json_key is None else ""
    row = parse_object(data, constants=True)
    if json_key not in row:
        raise ValueError(
            f"no key {json_key!r} (--json-key, data.json_key); its keys: {', '.join(map(repr, row)) or 'none'}"
        )
    if not isinstance(row[json_key], str):
        raise ValueError(f"{json_key!r} holds no text")
    return row[json_key]
