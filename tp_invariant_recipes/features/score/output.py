"""OUT, a file that a command writes in OUT.partial until it is whole, and OUT.meta.json: what decides its lines.

Before anything is loaded, `check` looks at all files of a command: whether they are there, and their first lines.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tp_invariant_recipes.data import sequences
from tp_invariant_recipes.errors import RunError, reason, refuse
from tp_invariant_recipes.features.score import engine_scores
from tp_invariant_recipes.files import sync_folder, write_atomically
from tp_invariant_recipes.ledger.rollout_certificate import WRITTEN
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.reading import MIB, open_file, parse_json, parse_object, read_limited
from tp_invariant_recipes.runs.run_dir import RunDir, writing


def meta(out: Path) -> Path:
    """Name OUT.meta.json."""
    return out.with_name(f"{out.name}.meta.json")


def partial(out: Path) -> RunDir:
    """Name OUT.partial."""
    return RunDir(out.with_name(f"{out.name}.partial"))


def finished(out: Path, what: str, serves: Callable[[Any], bool]) -> bool:
    """Whether OUT serves, given its identity. RunError: it holds others, or was changed. what: its lines, in words."""
    if not out.exists():
        return False
    before = read_json(meta(out))
    if not isinstance(before, dict) or not serves({k: v for k, v in before.items() if k != WRITTEN}):
        raise RunError(f"{out} exists and holds other {what}: choose another --out FILE, or remove it")
    check_unchanged(out)
    return True


def check_unchanged(out: Path) -> None:
    """Raise RunError: OUT is there, and was changed since it was written."""
    before = read_json(meta(out)) if out.exists() else None
    if isinstance(before, dict) and before.get(WRITTEN) != (now := described(out)):
        raise RunError(
            f"{out} was changed since tpi wrote it: it has {counted(now['lines'], 'line')} and another hash "
            f"than {meta(out).name} says; remove it to compute it again, or choose another --out FILE"
        )


def described(file: Path) -> dict[str, Any]:
    """Return what tells a file of lines from a changed one. Raises RunError."""
    digest, count = hashlib.sha256(), 0
    try:
        with open_file(file) as stream:
            while block := stream.read(MIB):
                digest.update(block)
                count += block.count(b"\n")
    except OSError as error:
        raise RunError(f"{file}: {error.strerror or error}") from error
    return {"sha256": digest.hexdigest(), "lines": count}


def claim(file: Path, identity: dict[str, Any], what: str) -> None:
    """Write the identity of what OUT.partial will have, a file there. Raises RunError: it has others already."""
    if read_json(file) not in (None, identity):
        raise RunError(f"{file.parent} holds a part of other {what}: choose another --out FILE, or remove it")
    with writing(file, "--out FILE"):
        write_atomically(file, json.dumps(identity, indent=2) + "\n")


def publish(whole: Path, out: Path, identity: dict[str, Any]) -> None:
    """Make a whole file of lines OUT, and write OUT.meta.json. Raises OSError."""
    write_atomically(meta(out), json.dumps(identity | {WRITTEN: described(whole)}, indent=2) + "\n")
    os.replace(whole, out)
    sync_folder(out.parent)


def read_json(file: Path) -> Any:
    """Read a JSON file; None: it is not there. Raises RunError."""
    try:
        return parse_json(read_limited(file, LARGEST)) if file.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: {reason(error)}") from error


def check(file: Path, against: Path | None, out: Path) -> None:
    """Raise ConfigError that lists every file that cannot be read, or written, or is of another format."""
    refuse([f"{name}: {why}" for name, why in (*_unfit(file, against), *_unwritable(out))])


def _unfit(file: Path, against: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the problems of each file that is read, its first line included."""
    for read, parse in ((file, _is_sequence), *([(against, _is_rollout)] if against else [])):
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


def check_written(out: Path) -> None:
    """Raise ConfigError: the file cannot be written."""
    refuse([f"{name}: {why}" for name, why in _unwritable(out)])


def _unwritable(out: Path) -> Iterator[tuple[Path, str]]:
    folder = out.expanduser().absolute().parent
    if out.expanduser().is_dir():
        yield out, "that is a folder; name a file"
    elif not (folder.is_dir() and os.access(folder, os.W_OK)):
        yield out, f"{folder} {'cannot be written' if folder.is_dir() else 'is no folder'}"


def _is_sequence(line: bytes) -> None:
    """Raise ValueError: it is no line of SEQUENCES, whatever the model's vocabulary and tokenizer."""
    sequences.parse(line, 1, 1 << 62, lambda text, _: [0] * (len(text) + 1))


def _is_rollout(line: bytes) -> None:
    engine_scores.parse(parse_object(line, constants=True), 1)
