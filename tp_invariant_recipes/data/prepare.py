"""Text in, indexed dataset out: scan, write the missing parts, merge them, publish.

PREFIX.partial/KEY.bin .idx   finished parts; KEY is a digest of the text, the tokenizer and the JSON key,
                              so parts cannot be confused and unchanged text is not tokenized again
PREFIX.partial/building.*     the part in progress; after a kill the next run removes it
PREFIX.lock                   held while writing
PREFIX.bin .json .idx         the result, published in this order
"""

import shutil
from contextlib import suppress
from pathlib import Path

from tp_invariant_recipes.data.files import beside, locked, write_errors
from tp_invariant_recipes.data.parts import Input, PartProgress, merge, write_parts
from tp_invariant_recipes.data.prepared import (
    INDEX_SUFFIXES,
    SUFFIXES,
    PreparedData,
    as_prefix,
    is_prepared,
    load,
    read_metadata,
)
from tp_invariant_recipes.data.source import scan, source_name
from tp_invariant_recipes.data.tokenizer import BYTE, FOLDER, identify, open_tokenizer
from tp_invariant_recipes.errors import DataError

# Text in one part. A kill costs the work on one part, some seconds with a Hugging Face tokenizer;
# merging costs Megatron's builder one garbage collection a part.
PART_BYTES = 32 * 2**20
_ABSENT = "no file or folder of text and no prepared dataset has this name"


def prepare(
    source: Path,
    prefix: Path,
    *,
    tokenizer: str = BYTE,
    json_key: str = "text",
    progress: PartProgress | None = None,
    part_bytes: int = PART_BYTES,
) -> PreparedData:
    """Turn a file or folder of text into PREFIX.bin, .idx and .json; return at once when they exist.

    A new call continues a killed run; the result has the same bytes, whatever the kill or `part_bytes`.
    tokenizer: "byte" or a local Hugging Face folder; json_key: the key of the text in a JSONL line;
    progress: called with (bytes done, bytes of text in all) after the scan and after each part.
    Raises DataError when the source is unusable, the disk is full, or PREFIX holds something else.
    """
    return _prepare(_read(source, tokenizer, json_key, part_bytes), as_prefix(prefix), progress)


def problems(path: Path, tokenizer: str) -> list[str]:
    """Why `ensure_prepared` finds no text or tokenizer of these names, each with its key. It reads no text."""
    problems = []
    prepared = path.suffix in INDEX_SUFFIXES or any(beside(as_prefix(path), suffix).exists() for suffix in SUFFIXES)
    if not path.exists() and not prepared:
        problems.append(f"data.path={path}: {_ABSENT}")
    try:
        if path.exists() or not prepared:
            identify(tokenizer, f"data.tokenizer={BYTE} or {FOLDER}")
    except DataError as error:
        problems.append(f"data.tokenizer: {error}")
    return problems


def ensure_prepared(
    path: Path, cache: Path, *, tokenizer: str = BYTE, json_key: str = "text", progress: PartProgress | None = None
) -> PreparedData:
    """Return the dataset at prefix `path` (or its .bin or .idx), or else the text at `path`, prepared in `cache`.

    A prepared dataset keeps its tokenizer. Text goes to cache/NAME-FINGERPRINT, so that other text or another
    tokenizer never finds an old result. Of several processes that want the same dataset, one makes it and the
    others wait. Raises DataError as `prepare` does, and when `path` names both a dataset and other text.
    """
    if not path.exists() and not any(beside(as_prefix(path), suffix).exists() for suffix in SUFFIXES):
        raise DataError(f"{path}: {_ABSENT}")
    if path.suffix in INDEX_SUFFIXES or not path.exists():
        return load(path)
    text = _read(path, tokenizer, json_key, PART_BYTES)
    return _prepare(text, _prefix(path, cache, text), progress)


def find_prepared(path: Path, cache: Path, *, tokenizer: str = BYTE, json_key: str = "text") -> PreparedData | int:
    """Return what `ensure_prepared` would return if it is there already, else the size of its vocabulary.

    Writes nothing.

    Raises DataError as `ensure_prepared` does, but for what only preparing finds out.
    """
    if not path.exists() or path.suffix in INDEX_SUFFIXES:
        return ensure_prepared(path, cache)  # a dataset that exists, or an error
    text = _read(path, tokenizer, json_key, PART_BYTES)
    prefix = _prefix(path, cache, text)
    return _finished(text, prefix, beside(prefix, ".partial")) or open_tokenizer(text.identity).vocab_size


def _prefix(path: Path, cache: Path, text: Input) -> Path:
    return path if is_prepared(path) else cache / f"{source_name(path)}-{text.fingerprint[:16]}"


def _read(source: Path, tokenizer: str, json_key: str, part_bytes: int) -> Input:
    identity = identify(tokenizer)
    corpus = scan(source, part_bytes)
    return Input(corpus, identity, json_key if corpus.has_jsonl else "")


def _prepare(text: Input, prefix: Path, progress: PartProgress | None) -> PreparedData:
    folder, lock = beside(prefix, ".partial"), beside(prefix, ".lock")
    if finished := _finished(text, prefix, folder):
        if folder.exists() or lock.exists():  # left by a kill after the last rename
            with suppress(OSError), locked(lock):  # on a read-only disk they may stay
                shutil.rmtree(folder)
        return finished
    tokenizer = open_tokenizer(text.identity)
    with write_errors(prefix, folder):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            # Another process may have finished while this one waited.
            if finished := _finished(text, prefix, folder):
                return finished
            folder.mkdir(exist_ok=True)
            try:
                write_parts(text, folder, tokenizer, progress)
                merge(text, folder, prefix, tokenizer)
            finally:
                # After an error in the first part there is nothing to keep.
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()
    return load(prefix)


def _finished(text: Input, prefix: Path, folder: Path) -> PreparedData | None:
    """Return the dataset at `prefix` if this input made it; None: there is none yet.

    Raises DataError when anything else is there, since tpi never overwrites it.
    """
    there = [str(beside(prefix, suffix)) for suffix in SUFFIXES if beside(prefix, suffix).exists()]
    # A .bin and .json without .idx are an unfinished merge of ours while their parts still exist.
    if not there or (folder.is_dir() and not beside(prefix, ".idx").exists()):
        return None
    if not is_prepared(prefix):
        raise DataError(f"{', '.join(there)}: in the way, not a complete dataset; move it or choose another --output")
    metadata = read_metadata(prefix)
    source = metadata.source
    differences = {
        "other text": source.sha256 != text.corpus.sha256,
        f"another tokenizer ({metadata.tokenizer})": metadata.tokenizer_sha256 != text.identity.sha256,
        f"another --json-key ({source.json_key})": source.json_key != text.json_key,
    }
    if any(differences.values()):
        made_from = " and ".join(what for what, differs in differences.items() if differs)
        raise DataError(
            f"{prefix} exists already, made from {made_from}; choose another --output, or name {prefix}.idx to use it"
        )
    return load(prefix)
