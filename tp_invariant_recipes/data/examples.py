"""Examples for fine-tuning: JSONL files, checked whole before ranks start, since Bridge reads lines as it trains."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.data.tokenizer import identify, open_tokenizer
from tp_invariant_recipes.errors import DataError, listed

# Problems that a message lists; a file that is no JSONL has one a line.
SHOWN = 5
# The keys under which Bridge looks for a conversation (megatron/bridge/data/sft_processing.py).
CONVERSATIONS = ("messages", "conversation", "conversations")


@dataclass(frozen=True)
class Examples:
    """Examples that can be trained on.

    digest:     hex SHA-256 of the files' bytes and of the tokenizer's: equal digests, equal tokens.
    count:      examples of the first file.
    vocab_size: of the tokenizer.
    """

    digest: str
    count: int
    vocab_size: int


def read_examples(
    folder: Path, files: Sequence[str], tokenizer: str, columns: Sequence[str], *, chat: bool
) -> Examples:
    """Read and check the files of a folder.

    files: names; each must be there. tokenizer: a local folder of Hugging Face. columns: keys of texts that each
    example must have. chat: whether each must be a conversation instead.
    Raises DataError that lists what is wrong, with file and line.
    """
    problems: list[str] = []
    digest, counts, vocab_size = hashlib.sha256(), [], 0
    for name in files:
        counts.append(_read(folder, name, columns, chat, digest, problems))
    try:
        identity = identify(str(Path(tokenizer).expanduser()))
        vocab_size = open_tokenizer(identity).vocab_size
        digest.update(identity.sha256.encode())
        if chat and not problems:
            _has_template(identity.folder, problems)
    except DataError as error:
        problems.append(f"tokenizer.tokenizer_model: {error}")
    if problems:
        more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        found = [*problems[:SHOWN], *more]
        raise DataError(found[0] if len(found) == 1 else listed(found))
    return Examples(digest.hexdigest(), counts[0], vocab_size)


def _read(
    folder: Path, name: str, columns: Sequence[str], chat: bool, digest: "hashlib._Hash", found: list[str]
) -> int:
    """The number of examples of a file. What is wrong with it is added to `found`."""
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        why = "no such folder" if not folder.is_dir() else "no such file" if not path.exists() else error.strerror
        found.append(f"dataset.dataset_root: {path if folder.is_dir() else folder}: {why}")
        return 0
    digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    lines = data.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    if not lines:
        found.append(f"{path}: no examples in it")
    for number, line in enumerate(lines, 1):
        found += [f"{path}, line {number}: {problem}" for problem in _wrong(line, columns, chat)]
    return len(lines)


def _wrong(line: bytes, columns: Sequence[str], chat: bool) -> Iterator[str]:
    """What keeps a line from being an example."""
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as error:
        yield "an empty line" if not line.strip() else f"not JSON ({error})"
        return
    if not isinstance(example, dict):
        yield "not an object in braces"
        return
    keys = ", ".join(map(repr, example)) or "none"
    if chat and not any(isinstance(example.get(key), list) and example[key] for key in CONVERSATIONS):
        yield f"no conversation under any of {', '.join(CONVERSATIONS)}; its keys: {keys}"
    for column in columns:
        if not isinstance(example.get(column), str):
            yield f"{column!r} holds no text" if column in example else f"no key {column!r}; its keys: {keys}"


def _has_template(folder: Path | None, found: list[str]) -> None:
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(str(folder), local_files_only=True).chat_template is None:
        found.append(f"tokenizer.tokenizer_model: {folder} has no chat template, which turns conversations into text")
