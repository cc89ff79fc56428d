"""The files of `tpi score`, looked at before anything is loaded: whether they are there, and their first lines."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import reason, refuse
from tp_invariant_recipes.features.score import engine_scores
from tp_invariant_recipes.reading import open_file, parse_object


def check(file: Path, against: Sequence[Path], hidden: Path | None, written: Sequence[Path]) -> None:
    """Raise ConfigError that lists every file that cannot be read, or written, or is of another format."""
    refuse([f"{name}: {why}" for name, why in _unfit(file, against, hidden, written)])


def _unfit(
    file: Path, against: Sequence[Path], hidden: Path | None, written: Sequence[Path]
) -> Iterator[tuple[Path, str]]:
    """Yield the problems of each file, the first line of those that are read included."""
    for read, parse in ((file, _is_sequence), *((rollouts, _is_rollout) for rollouts in against)):
        read = read.expanduser()
        try:
            with open_file(read) as stream:
                line = next((line for line in stream if line.strip()), None)
            if line is None:
                yield read, "it has no lines"
            else:
                parse(line)
        except OSError as error:
            yield read, reason(error)
        except ValueError as error:
            yield read, f"its first line: {reason(error)}"
    if hidden is not None and not hidden.expanduser().is_file():
        yield hidden, "there is no such file"
    yield from _unwritable(written)


def check_written(written: Sequence[Path]) -> None:
    """Raise ConfigError that lists every file that cannot be written."""
    refuse([f"{name}: {why}" for name, why in _unwritable(written)])


def _unwritable(written: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for target in written:
        folder = target.expanduser().absolute().parent
        if target.expanduser().is_dir():
            yield target, "that is a folder; name a file"
        elif not (folder.is_dir() and os.access(folder, os.W_OK)):
            yield target, f"{folder} {'cannot be written' if folder.is_dir() else 'is no folder'}"


def _is_sequence(line: bytes) -> None:
    """Raise ValueError: it is no line of SEQUENCES, whatever the model's vocabulary and tokenizer."""
    sequences.parse(line, 1, 1 << 62, lambda text, _: [0] * (len(text) + 1))


def _is_rollout(line: bytes) -> None:
    engine_scores.parse(parse_object(line, constants=True), 1)
