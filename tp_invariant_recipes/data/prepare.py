"""Text in, indexed dataset out: scan, write the parts that are missing, merge them, publish.

PREFIX.partial/KEY.bin .idx   finished parts; KEY is the digest of the text in it and of how it is read,
                              so none is mistaken for another, and unchanged text is not tokenized again
PREFIX.partial/building.*     what is being written; removed by the next run when this one is killed
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
from tp_invariant_recipes.data.tokenizer import BYTE, identify, open_tokenizer
from tp_invariant_recipes.errors import DataError

# Text in one part: some seconds of work for a Hugging Face tokenizer, which is what a kill costs, while
# merging costs Megatron's builder one garbage collection a part.
PART_BYTES = 32 * 2**20


def prepare(
    source: Path,
    prefix: Path,
    *,
    tokenizer: str = BYTE,
    json_key: str = "text",
    progress: PartProgress | None = None,
    part_bytes: int = PART_BYTES,
) -> PreparedData:
    """Turn a file or folder of text into PREFIX.bin, .idx and .json; return at once when that is done.

    A run that was killed is continued; the result has the same bytes, whatever the kill or `part_bytes`.
    tokenizer: "byte" or a local Hugging Face folder; json_key: where a JSONL line has its text;
    progress: called with (bytes done, bytes of text in all), when the source is read and after each part.
    Raises DataError when the source cannot be used, the disk is full, or PREFIX holds something else.
    """
    return _prepare(_read(source, tokenizer, json_key, part_bytes), as_prefix(prefix), progress)


def ensure_prepared(
    path: Path,
    cache: Path,
    *,
    tokenizer: str = BYTE,
    json_key: str = "text",
    progress: PartProgress | None = None,
) -> PreparedData:
    """The dataset at prefix `path` (or its .bin or .idx), or else the text at `path`, prepared in `cache`.

    A prepared dataset keeps the tokenizer it was made with. Text goes to cache/NAME-FINGERPRINT, so that
    other text or another tokenizer never meets an old result; of processes that want the same one at once,
    one makes it and the others wait. Raises DataError as `prepare` does, and when `path` names both a dataset
    and text that it was not made from.
    """
    if not path.exists() and not any(beside(as_prefix(path), suffix).exists() for suffix in SUFFIXES):
        raise DataError(f"{path}: no such file or folder of text, and no prepared dataset of this name")
    if path.suffix in INDEX_SUFFIXES or not path.exists():
        return load(path)
    text = _read(path, tokenizer, json_key, PART_BYTES)
    prefix = path if is_prepared(path) else cache / f"{source_name(path)}-{text.fingerprint[:16]}"
    return _prepare(text, prefix, progress)


def _read(source: Path, tokenizer: str, json_key: str, part_bytes: int) -> Input:
    identity = identify(tokenizer)
    corpus = scan(source, part_bytes)
    return Input(corpus, identity, json_key if corpus.has_jsonl else "")


def _prepare(text: Input, prefix: Path, progress: PartProgress | None) -> PreparedData:
    folder, lock = beside(prefix, ".partial"), beside(prefix, ".lock")
    if finished := _finished(text, prefix, folder):
        if folder.exists() or lock.exists():  # left by a kill after the last rename
            with suppress(OSError), locked(lock):  # they do not matter where nothing can be written
                shutil.rmtree(folder)
        return finished
    tokenizer = open_tokenizer(text.identity)
    with write_errors(prefix, folder):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            # Asked again, because another process may have finished while this one waited.
            if finished := _finished(text, prefix, folder):
                return finished
            folder.mkdir(exist_ok=True)
            try:
                write_parts(text, folder, tokenizer, progress)
                merge(text, folder, prefix, tokenizer)
            finally:
                # After a mistake in the very first part there is nothing to keep.
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()
    return load(prefix)


def _finished(text: Input, prefix: Path, folder: Path) -> PreparedData | None:
    """The dataset at `prefix` if it was made from this input, None if there is none yet.

    Raises DataError when something else is there: it is never overwritten.
    """
    there = [str(beside(prefix, suffix)) for suffix in SUFFIXES if beside(prefix, suffix).exists()]
    # A .bin and .json without .idx are ours when the parts that they were merged from are still there.
    if not there or (folder.is_dir() and not beside(prefix, ".idx").exists()):
        return None
    if not is_prepared(prefix):
        raise DataError(f"{', '.join(there)}: in the way, and not a whole dataset; move it or choose another --output")
    metadata = read_metadata(prefix)
    source = metadata["source"]
    differences = {
        "other text": source.get("sha256") != text.corpus.sha256,
        f"another tokenizer ({metadata['tokenizer']})": metadata["tokenizer_sha256"] != text.identity.sha256,
        f"another --json-key ({source.get('json_key')})": source.get("json_key") != text.json_key,
    }
    if any(differences.values()):
        made_from = " and ".join(what for what, differs in differences.items() if differs)
        raise DataError(
            f"{prefix} is there already, made from {made_from}; choose another --output, or name {prefix}.idx to use it"
        )
    return load(prefix)
