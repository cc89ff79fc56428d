"""Writing a report: whole or not at all, and over nothing that is there."""

from collections.abc import Mapping
from pathlib import Path

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.files import write_atomically


def check(files: Mapping[str, Path | None], force: bool = False) -> None:
    """See that nothing would be written over. RunError: lists every file that is there, or is named twice.

    files: option -> its file, if it has one. force: files that are there may be written over.
    """
    wanted = [(option, file) for option, file in files.items() if file]
    problems = [
        f"{file} exists already: {option} takes another name, --force writes over it"
        for option, file in wanted
        if file.exists() and not force
    ]
    names: dict[Path, str] = {}
    for option, file in wanted:
        earlier = names.setdefault(file.resolve(), option)
        if earlier != option:
            problems.append(f"{file} is the file of {earlier} and of {option}: they need two names")
    if problems:
        raise RunError("\n".join(problems))


def write(file: Path, data: bytes) -> None:
    """Write a file at once. RunError: it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror or error}") from error
