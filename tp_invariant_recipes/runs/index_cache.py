"""The manifest of a run's index cache: the files that Megatron builds to order samples, and their digests.

Megatron builds a file if there is none of its name, and otherwise trains on what the file holds: a file that a killed
rank has half written fails every later attempt, and a changed shuffle index trains on other samples. So an attempt
keeps only files that agree with the manifest. The manifest also holds the digests that the rebuilt files must have.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tp_invariant_recipes.errors import RunError, reason
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.reading import Record, checked, parse_json, read_limited
from tp_invariant_recipes.runs.checkpoints import MANIFEST, CheckpointFile, described


@dataclass(frozen=True)
class IndexManifest(Record):
    """files: path in the cache → the file."""

    schema: Literal[1] = field(default=1, kw_only=True)
    files: dict[str, CheckpointFile]


def remove_unrecorded(cache: Path) -> list[str]:
    """Remove files that the manifest lacks or contradicts, which Megatron builds again, and return them. RunError."""
    recorded = _read(cache)
    wrong = [name for name, file in described(cache).items() if recorded.get(name) != file]
    for name in wrong:
        (cache / name).unlink()
    return wrong


def record(cache: Path) -> None:
    """Write the manifest of a cache that is whole. Raises RunError: a rebuilt file is not the one recorded before."""
    recorded, files = _read(cache), described(cache)
    wrong = sorted(name for name, file in recorded.items() if name in files and files[name] != file)
    if wrong:
        raise RunError(
            f"{cache}: Megatron builds {', '.join(wrong)} with other contents than this run has trained with so far, "
            f"so that its steps to come would read other samples; continue with the versions in versions.json"
        )
    if files and files != recorded:
        manifest = IndexManifest(recorded | files)
        write_atomically(cache / MANIFEST, json.dumps(manifest.as_json(), indent=1))


def _read(cache: Path) -> dict[str, CheckpointFile]:
    file = cache / MANIFEST
    try:
        return checked(IndexManifest, parse_json(read_limited(file, LARGEST))).files if file.exists() else {}
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: {reason(error)}; remove {cache}, and the next attempt builds it again") from error
