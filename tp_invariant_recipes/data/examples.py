"""Examples for fine-tuning: JSONL files, checked whole before ranks start, since Bridge reads lines as it trains."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.data.tokenizer import FOLDER, identify, open_tokenizer
from tp_invariant_recipes.errors import ConfigError, DataError, listed, reason
from tp_invariant_recipes.reading import parse_object, read_lines
from tp_invariant_recipes.settings.sft import VALIDATION

# Problems that a message lists; a file that is no JSONL has one a line.
SHOWN = 5
# The keys under which Bridge looks for a conversation (megatron/bridge/data/sft_processing.py).
CONVERSATIONS = ("messages", "conversation", "conversations")


FOR_CONVERSATIONS = (
    "; for conversations: cfg.dataset.preprocessing = ChatSFTPreprocessingConfig() in the recipe, and a tokenizer with "
    "a chat template (docs/finetuning.md)"
)


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
    folder: Path,
    files: Sequence[str],
    tokenizer: str | None,
    columns: Sequence[str],
    *,
    chat: bool,
    sequences: int = 1,
    vocabulary: int | None = None,
) -> Examples:
    """Read and check the files of a folder.

    files: names; each must be there. tokenizer: a local folder of Hugging Face; None: check the examples alone.
    columns: keys of texts that each example must have. chat: whether each must be a conversation instead.
    sequences: of a step. vocabulary: token ids of the model.
    Raises ConfigError that lists what is wrong, with file and line.
    """
    read = [_read(folder / name, tuple(columns), chat) for name in files]
    problems = [problem for part in read for problem in part.problems]
    digest, vocab_size = hashlib.sha256(), 0
    for name, part in zip(files, read, strict=True):
        digest.update(f"{name} {part.sha256}\n".encode())
    if 0 < read[0].count < sequences:
        problems.append(f"{folder / files[0]} has {read[0].count} examples, and a step takes {sequences}; lower gbs")
    try:
        if tokenizer is not None:
            identity = identify(str(Path(tokenizer).expanduser()), FOLDER)
            opened = open_tokenizer(identity)
            vocab_size = opened.vocab_size
            digest.update(identity.sha256.encode())
            if chat and not problems and not opened.has_template:
                problems.append(
                    f"tokenizer.tokenizer_model: {identity.folder} has no chat template, which turns conversations "
                    f"into text"
                )
    except DataError as error:
        problems.append(f"tokenizer.tokenizer_model: {error}")
    if vocabulary is not None and vocab_size > vocabulary:
        problems.append(
            f"tokenizer.tokenizer_model={tokenizer} has {vocab_size} token ids and the model {vocabulary}; the "
            f"tokenizer of the model, or model.vocab_size={vocab_size}"
        )
    if problems:
        raise ConfigError(listed(problems), problems)
    return Examples(digest.hexdigest(), read[0].count, vocab_size)


@dataclass(frozen=True)
class _File:
    """A file of examples. problems: the first ones, with file and line."""

    sha256: str
    count: int
    problems: tuple[str, ...]


def _read(path: Path, columns: tuple[str, ...], chat: bool) -> _File:
    try:
        status = path.stat()
        return _checked(path, columns, chat, (status.st_size, status.st_mtime_ns))
    except (OSError, ValueError) as error:
        absent = f"{path.parent}: no such folder" if not path.parent.is_dir() else f"{path}: no such file"
        why = f"{path}: {getattr(error, 'strerror', None) or error}" if path.exists() else absent
        without = "; validation.eval_iters=0 needs none" if path.name == VALIDATION and path.parent.is_dir() else ""
        return _File("", 0, (f"dataset.dataset_root: {why}{without}",))


@functools.lru_cache
def _checked(path: Path, columns: tuple[str, ...], chat: bool, state: tuple[int, int]) -> _File:
    """state: size and time of change; the runs of one command have the same examples, which are read once."""
    digest, number, wrong, problems = hashlib.sha256(), 0, 0, []
    for number, line in read_lines(path):
        digest.update(line)
        for problem in _wrong(line, columns, chat):
            wrong += 1
            if wrong <= SHOWN:
                problems.append(f"{path}, line {number}: {problem}")
    if not number:
        problems.append(f"{path}: no examples in it")
    if wrong > SHOWN:
        problems.append(f"{path}: {wrong - SHOWN} more problems")
    return _File(digest.hexdigest(), number, tuple(problems))


def _wrong(line: bytes, columns: Sequence[str], chat: bool) -> Iterator[str]:
    """Yield what keeps a line from being an example."""
    try:
        example = parse_object(line, constants=True)
    except ValueError as error:
        yield "an empty line" if not line.strip() else reason(error)
        return
    keys = ", ".join(map(repr, example)) or "none"
    if chat and not any(isinstance(example.get(key), list) and example[key] for key in CONVERSATIONS):
        yield f"no conversation under any of {', '.join(CONVERSATIONS)}; its keys: {keys}"
    for column in columns:
        if not isinstance(example.get(column), str):
            hint = FOR_CONVERSATIONS if any(key in example for key in CONVERSATIONS) else ""
            yield f"{column!r} holds no text" if column in example else f"no key {column!r}; its keys: {keys}{hint}"
