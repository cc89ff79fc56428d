"""A finished dataset: PREFIX.bin and .idx as Megatron reads them, and PREFIX.json that describes them."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.data.files import beside, sha256_of_file
from tp_invariant_recipes.data.source import Corpus
from tp_invariant_recipes.data.tokenizer import Identity, Tokenizer
from tp_invariant_recipes.errors import DataError
from tp_invariant_recipes.reading import MIB, Count, Hash, Listed, Record, checked, parse_json, read_limited

SCHEMA_VERSION = 1
LARGEST = 64 * MIB  # bytes of PREFIX.json, which lists the files of the source
INDEX_SUFFIXES = (".bin", ".idx")
SUFFIXES = (*INDEX_SUFFIXES, ".json")

_HOW_TO_REMAKE = "remove its .bin, .idx and .json and run tpi data prepare again"


@dataclass(frozen=True)
class TextFile(Record):
    """A file of the text."""

    name: str
    bytes: Count
    sha256: Hash


@dataclass(frozen=True)
class TextSource(Record):
    """The text of a dataset. Equal `sha256` and `json_key` mean equal documents."""

    name: str
    json_key: str
    sha256: Hash
    files: Listed[TextFile]


@dataclass(frozen=True)
class Metadata(Record):
    """PREFIX.json."""

    schema_version: int
    tokenizer: str
    tokenizer_sha256: Hash
    vocab_size: Count
    eod: Count
    documents: Count
    tokens: Count
    bin_bytes: Count
    bin_sha256: Hash
    idx_bytes: Count
    idx_sha256: Hash
    source: TextSource


@dataclass(frozen=True)
class PreparedData:
    """A complete dataset.

    prefix: path without .bin or .idx; vocab_size: includes eod; tokens: includes one eod a document;
    digest: sha256 hex over the digests of both files.
    """

    prefix: Path
    tokenizer: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    digest: str


def as_prefix(path: Path) -> Path:
    """PREFIX of PREFIX.bin or .idx, which users name as often. Raises DataError for a path without a name."""
    if path.name in ("", ".."):
        raise DataError(f"{path}: an output needs a name, as in --output data/corpus")
    return path.with_name(path.stem) if path.suffix in INDEX_SUFFIXES else path


def is_prepared(path: Path) -> bool:
    """Whether all three files exist. `load` checks their content."""
    return path.name not in ("", "..") and all(beside(as_prefix(path), suffix).is_file() for suffix in SUFFIXES)


def load(prefix: Path, *, verify: bool = False) -> PreparedData:
    """Read PREFIX.json and check the sizes of .bin and .idx against it; with `verify` also their digests.

    Raises DataError with the list of problems when a file is missing, damaged or from another version.
    """
    prefix = as_prefix(prefix)
    metadata = read_metadata(prefix)
    problems = []
    for name, size, digest in (
        ("bin", metadata.bin_bytes, metadata.bin_sha256),
        ("idx", metadata.idx_bytes, metadata.idx_sha256),
    ):
        path = beside(prefix, f".{name}")
        if path.stat().st_size != size:
            problems.append(f"{path} has {path.stat().st_size} bytes instead of {size}")
        elif verify and sha256_of_file(path) != digest:
            problems.append(f"{path} changed after it was prepared (sha256 differs)")
    if problems:
        raise DataError("\n".join([f"{prefix} is damaged; {_HOW_TO_REMAKE}:", *problems]))
    return PreparedData(
        prefix,
        metadata.tokenizer,
        metadata.vocab_size,
        metadata.eod,
        metadata.documents,
        metadata.tokens,
        hashlib.sha256(f"{metadata.bin_sha256} {metadata.idx_sha256}".encode()).hexdigest(),
    )


def read_metadata(prefix: Path) -> Metadata:
    """PREFIX.json of a dataset. Raises DataError when one of its files is missing or tpi did not write PREFIX.json."""
    missing = [str(beside(prefix, suffix)) for suffix in SUFFIXES if not beside(prefix, suffix).is_file()]
    if missing:
        raise DataError(f"no prepared data at {prefix}: {', '.join(missing)} missing; make it with tpi data prepare")
    path = beside(prefix, ".json")
    try:
        metadata = parse_json(read_limited(path, LARGEST))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}); {_HOW_TO_REMAKE}") from error
    version = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if version != SCHEMA_VERSION:
        shown = version if isinstance(version, int) and abs(version) < 10**6 else None
        raise DataError(f"{path} has schema version {shown}, this tpi reads {SCHEMA_VERSION}; {_HOW_TO_REMAKE}")
    try:
        return checked(Metadata, metadata)
    except ValueError as error:
        raise DataError(f"{path} is not what tpi writes ({error}); {_HOW_TO_REMAKE}") from error


def describe(corpus: Corpus, json_key: str) -> TextSource:
    """Return the source of a dataset."""
    return TextSource(corpus.name, json_key, corpus.sha256, tuple(TextFile(*file) for file in corpus.files))


def metadata_text(
    built: Path, identity: Identity, tokenizer: Tokenizer, documents: int, tokens: int, source: TextSource
) -> str:
    """Return the text of PREFIX.json for the pair at `built`; equal inputs give equal text at any time and place."""
    binary, index = (beside(built, suffix) for suffix in INDEX_SUFFIXES)
    metadata = Metadata(
        schema_version=SCHEMA_VERSION,
        tokenizer=identity.name,
        tokenizer_sha256=identity.sha256,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        documents=documents,
        tokens=tokens,
        bin_bytes=binary.stat().st_size,
        bin_sha256=sha256_of_file(binary),
        idx_bytes=index.stat().st_size,
        idx_sha256=sha256_of_file(index),
        source=source,
    )
    return json.dumps(metadata.as_json(), indent=2) + "\n"
