# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as values: they turn a document's bytes into token ids with eod at the end."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.errors import DataError
from tp_invariant_recipes.reading import open_file

if TYPE_CHECKING:
    import numpy as np  # below: commands that train nothing need no array

BYTE = "byte"
BYTE_EOD = 256
FOLDER = "a local folder with a Hugging Face tokenizer"

# The files of a Hugging Face folder that decide the ids of a text or of a conversation, and those that others of its
# kinds of tokenizers have; model weights beside them do not matter.
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "config.json", "vocab*", "merges.txt"),
    *("*.model", "*.tiktoken", "*.spm", "*.bpe", "tekken.json", "normalizer.json", "dict.txt", "bpe.codes"),
    *("chat_template*", "additional_chat_templates/*"),
)

# Documents in one call of a Hugging Face tokenizer, which processes them in parallel.
BATCH = 256


@dataclass(frozen=True)
class Identity:
    """The identity of a tokenizer, computed without loading it.

    name: "byte", or "hf:" and the folder's name; sha256: hex, over the tokenizer's files;
    folder: None for byte.
    """

    name: str
    sha256: str
    folder: Path | None


@dataclass(frozen=True)
class Tokenizer:
    """vocab_size: includes eod. encode: documents -> one integer array a document, eod at its end.

    has_template: whether it turns conversations into text.
    """

    vocab_size: int
    eod: int
    encode: "Callable[[Iterable[str]], Iterator[np.ndarray]]"
    has_template: bool = False


def identify(tokenizer: str, choices: str = f"{BYTE!r} or {FOLDER}") -> Identity:
    """`tokenizer`: "byte" or a local Hugging Face folder. Raises DataError with the choices when it is neither."""
    if tokenizer == BYTE:
        return Identity(BYTE, hashlib.sha256(b"byte: UTF-8 bytes, eod 256").hexdigest(), None)
    folder = Path(tokenizer)
    if not folder.is_dir():
        raise DataError(
            f"tokenizer {tokenizer}: no such folder. Give {choices}; tpi downloads nothing "
            "(save one with AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER))"
        )
    files = tokenizer_files(folder)
    if not any(path.name != "config.json" for path in files):
        raise DataError(
            f"tokenizer {tokenizer}: no tokenizer files in this folder (tokenizer.json or the like). Give {choices}"
        )
    digest = hashlib.sha256()
    for path in files:
        try:
            with open_file(path) as stream:
                digest.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
        except OSError as error:
            raise DataError(f"tokenizer {tokenizer}: cannot read {path}: {error.strerror}") from error
    return Identity(f"hf:{folder.resolve().name}", digest.hexdigest(), folder)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer in a folder of Hugging Face."""
    return sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


@functools.lru_cache(maxsize=1)  # a large vocabulary takes a second
def open_tokenizer(identity: Identity) -> Tokenizer:
    """Load the tokenizer. Raises DataError when the folder has no usable tokenizer with an eos token."""
    if identity.folder is None:
        return Tokenizer(vocab_size=BYTE_EOD + 1, eod=BYTE_EOD, encode=_encode_bytes)
    tokenizer = of_folder(identity.folder)
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {identity.folder}: no eos token to end documents with; set eos_token")
    vocab_size, eod = len(tokenizer), tokenizer.eos_token_id
    return Tokenizer(
        vocab_size,
        eod,
        lambda documents: _encode_hf(tokenizer, vocab_size, eod, documents),
        has_template=tokenizer.chat_template is not None,
    )


def of_folder(folder: Path) -> Any:
    """Return the tokenizer of a Hugging Face folder. Raises DataError."""
    from transformers import AutoTokenizer  # seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for damaged files
        raise DataError(f"tokenizer {folder}: cannot load it: {error}") from error
    # Without its files transformers makes a tokenizer of special tokens, some kinds with a space as well.
    if len({*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}) < 2:
        raise DataError(
            f"tokenizer {folder}: it makes no token of any text, since it has special tokens alone; a file is missing "
            "(tokenizer.json, tokenizer.model or the like)"
        )
    return tokenizer


def _encode_bytes(documents: Iterable[str]) -> "Iterator[np.ndarray]":
    import numpy as np

    for document in documents:
        yield np.append(np.frombuffer(document.encode(), dtype=np.uint8).astype(np.uint16), np.uint16(BYTE_EOD))


def _encode_hf(tokenizer: Any, vocab_size: int, eod: int, documents: Iterable[str]) -> "Iterator[np.ndarray]":
    """Raise DataError for an id outside the vocabulary, which the index's type would turn into another token."""
    import numpy as np

    for batch in batched(documents, BATCH):
        # verbose=False: documents longer than the model's context are expected here.
        try:
            rows = tokenizer([*batch], add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # as above
            raise DataError(f"the tokenizer cannot make tokens of the text: {error}") from error
        for ids in rows:
            array = np.array([*ids, eod], dtype=np.int64)
            if array.max() >= vocab_size:
                raise DataError(f"the tokenizer made token {array.max()}, but its vocabulary has {vocab_size}")
            yield array
