# SPDX-License-Identifier: Apache-2.0
"""Examples for fine-tuning: JSONL files, checked whole before ranks start, since Bridge reads lines as it trains."""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.data.tokenizer import FOLDER, identify, open_tokenizer
from tp_invariant_recipes.errors import ConfigError, DataError, listed, reason
from tp_invariant_recipes.reading import MIB, parse_object, read_limited, read_lines
from tp_invariant_recipes.settings.finetuning import TRAINING, VALIDATION
from tp_invariant_recipes.text import abbreviated

# Problems that a message lists; a file that is no JSONL has one a line.
SHOWN = 5
# Examples that are made tokens before the start: some ten seconds.
TRIED = 5000
# The keys under which Bridge looks for a conversation (megatron/bridge/data/sft_processing.py).
CONVERSATIONS = ("messages", "conversation", "conversations")


NO_MARKS = (
    "the chat template of tokenizer.tokenizer_model does not mark answers; put {% generation %} and "
    "{% endgeneration %} around them, or dataset.preprocessing.loss_mode=full"
)
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
    template: str | None = None,
    template_file: Path | None = None,
) -> Examples:
    """Read and check the files of a folder.

    files: names; each must be there. tokenizer: a local folder of Hugging Face; None: check the examples alone.
    columns: keys of texts that each example must have. chat: whether each must be a conversation instead.
    sequences: of a step. vocabulary: token ids of the model. template, template_file: a chat template in the place of
    the tokenizer's, or a file of one.
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
            if template_file is not None:  # the identity has its name alone
                digest.update(read_limited(template_file, MIB))
            if chat and not problems and not (opened.has_template or template or template_file):
                problems.append(
                    f"tokenizer.tokenizer_model: {identity.folder} has no chat template, which turns conversations "
                    f"into text"
                )
    except DataError as error:
        problems.append(f"tokenizer.tokenizer_model: {error}")
    except (OSError, ValueError) as error:
        problems.append(f"tokenizer.chat_template_path={template_file}: {reason(error)}")
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
    if chat:
        turns = next((example[key] for key in CONVERSATIONS if example.get(key) is not None), None)
        if isinstance(turns, list) and turns:
            yield from (f"turn {number} {why}" for number, turn in enumerate(turns, 1) if (why := _wrong_turn(turn)))
        else:
            yield f"no conversation under any of {', '.join(CONVERSATIONS)}; its keys: {keys}"
    for column in columns:
        if not isinstance(example.get(column), str):
            hint = FOR_CONVERSATIONS if any(key in example for key in CONVERSATIONS) else ""
            yield f"{column!r} holds no text" if column in example else f"no key {column!r}; its keys: {keys}{hint}"


def _wrong_turn(turn: Any) -> str:
    """Return what keeps a value from being a turn of a conversation; "": nothing."""
    if not isinstance(turn, dict):
        return "is no object with role and content"
    role, content = ("role", "content") if {"role", "content"} <= {*turn} else ("from", "value")
    if not {role, content} <= {*turn}:
        return f"has no role and content (or from and value); its keys: {', '.join(map(repr, turn)) or 'none'}"
    if not isinstance(turn[role], str) or not turn[role]:
        return f"has a {role} that is no text"
    if not isinstance(turn[content], str) and not (turn[content] is None and turn.get("tool_calls")):
        parts = turn[content] if isinstance(turn[content], list) else [None]
        if not all(isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in parts):
            return f"has a {content} that is no text"
    return ""


def try_tokens(dataset: Any, tokenizer: Any) -> str:
    """Let Bridge make tokens of the first examples, as ranks will.

    dataset, tokenizer: of Bridge's configuration. Returns what the user should know, "" if nothing. Raises ConfigError:
    Bridge cannot read an example, or no token of them counts, which is a loss of NaN.
    """
    from megatron.bridge.data.datasets.utils import _chat_preprocess
    from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig, tokenize_prompt_completion_example
    from megatron.bridge.data.token_utils import extract_skipped_token_ids
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    how, seq = dataset.preprocessing, dataset.seq_length
    if how is None:  # a template of Bridge's older recipes, which ends with the end of a document, and that counts
        return ""
    file, opened = Path(dataset.dataset_root) / TRAINING, build_tokenizer(tokenizer)
    tools = (dataset.dataset_kwargs or {}).get("tool_schemas")
    problems: dict[str, str] = {}
    empty, number = [], 0
    for number, line in itertools.islice(read_lines(file), TRIED):
        example = parse_object(line, constants=True)
        try:
            if isinstance(how, ChatSFTPreprocessingConfig):
                mask = _chat_preprocess(example, opened, tools, loss_mode=how.loss_mode)["loss_mask"]
            else:
                skipped = extract_skipped_token_ids(opened)
                mask = tokenize_prompt_completion_example(
                    example, opened, how, max_length=seq, skipped_tokens=skipped
                ).loss_mask
        except Exception as error:  # a chat template may raise anything
            why = NO_MARKS if "{% generation %}" in str(error) else reason(error)
            problems.setdefault(why, f"{file}, line {number}: {why}")
            if len(problems) == SHOWN:
                break
        else:
            if not mask[1 : seq + 1].any():  # the first token is no label, and longer examples are cut
                empty.append(number)
    if problems:
        raise ConfigError(listed([*problems.values()]), [*problems.values()])
    first = f"the first {number}" if number == TRIED else f"{number}"
    counting = f"{len(empty)} of {first} examples have no token that counts"
    why = f"no answer within seq={seq}, or none that dataset.preprocessing.loss_mode={how.loss_mode} takes"
    if len(empty) == number:
        raise ConfigError(f"{file}: {counting} ({why}); raise seq and dataset.seq_length, or mend the examples")
    return f"{file}: {counting} ({why}): lines {abbreviated([*map(str, empty)], SHOWN)}" if empty else ""
