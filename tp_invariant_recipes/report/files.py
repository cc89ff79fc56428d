"""Writes a report whole or not at all, and never over an existing file unless told to."""

from collections.abc import Mapping
from pathlib import Path

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import write_atomically


def check(files: Mapping[str, Path | None], force: bool = False) -> None:
    """RunError: lists every file that exists, without `force`, or has two options. files: option -> its file."""
    wanted = [(option, file) for option, file in files.items() if file]
    problems = [
        f"{file} exists already: give another file by {option}, or overwrite it by --force"
        for option, file in wanted
        if file.exists() and not force
    ]
    names: dict[Path, str] = {}
    for option, file in wanted:
        earlier = names.setdefault(file.resolve(), option)
        if earlier != option:
            problems.append(f"{earlier} and {option} name the same file, {file}: give each its own")
    if problems:
        raise RunError("\n".join(problems))


def write(file: Path, data: bytes) -> None:
    """Write a file atomically. RunError: the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}") from error
