# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: which are finished, of which run they are, and whether their bytes have changed.

Bridge writes a checkpoint's files and then moves its own markers; a run killed in between leaves a folder that looks
usable. So a manifest is written last: a checkpoint without one is unfinished, one that disagrees with it is damaged.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from tp_invariant_recipes.errors import CheckpointError
from tp_invariant_recipes.files import write_atomically
from tp_invariant_recipes.ledger.evidence import SUFFIX
from tp_invariant_recipes.ledger.run_files import LARGEST
from tp_invariant_recipes.reading import MIB, Count, Layout, Listed, Record, checked, parse_json, read_limited

if TYPE_CHECKING:
    from tp_invariant_recipes.runs.run_dir import RunDir

MANIFEST = "tpi-manifest.json"
OF_FSDP = "DTensors of Megatron-FSDP"  # the form of an optimizer's state; the weights have it, too
ASIDE = "set-aside"
UNTRUSTED = "untrusted.json"  # of a guard
_ITERATION = re.compile(r"iter_(\d{7})")
_THREADS = 16  # at most, that read at once; reading and hashing hold no GIL


@dataclass(frozen=True)
class CheckpointFile(Record):
    """A file of a checkpoint: its size and digest."""

    bytes: Count
    xxh3_128: str


@dataclass(frozen=True)
class CheckpointManifest(Record):
    """A checkpoint that was written to the end.

    step:            completed when it was saved.
    optimizer_state: its form, one of config/fingerprint.py.
    separate_experts:   whether experts have an optimizer of their own.
    files:           path in the checkpoint → the file.
    """

    schema: Literal[1] = field(default=1, kw_only=True)
    step: Count
    identity_hash: str
    layout: Layout
    optimizer_state: str
    separate_experts: bool
    files: dict[str, CheckpointFile]


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint with a manifest. step: completed steps when it was saved."""

    path: Path
    step: int

    def read_manifest(self) -> CheckpointManifest:
        """Return what was written. Raises CheckpointError when the manifest cannot be read."""
        try:
            manifest = checked(CheckpointManifest, parse_json(read_limited(self.path / MANIFEST, LARGEST)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its manifest cannot be read: {error}") from error
        if outside := [name for name in manifest.files if name.startswith("/") or ".." in Path(name).parts]:
            raise CheckpointError(f"{self.path}: its manifest names a file outside of it: {outside[0]}")
        return manifest

    def verify(self, *, hashes: bool = True, node: int = 0, nodes: int = 1) -> None:
        """Look at every file. Raises CheckpointError naming each that is missing, altered or not in the manifest.

        hashes: also read the files and compare their hashes: all of them or, where several nodes read at once, every
                `nodes`th in order of size, from number `node` on.
        """
        files = self.read_manifest().files
        wrong = dict.fromkeys(_paths(self.path).keys() - files, "is not in its manifest")
        wrong |= {name: text for name, file in files.items() if (text := _size_problem(self.path / name, file))}
        ordered = sorted(files, key=lambda name: (-files[name].bytes, name))
        read = [name for name in ordered[node::nodes] if hashes and name not in wrong]
        for name, digest in zip(read, _digests([self.path / name for name in read]), strict=True):
            if digest != files[name].xxh3_128:
                wrong[name] = "has changed since it was written"
        if wrong:
            listed = "\n".join(f"  - {name} {wrong[name]}" for name in sorted(wrong))
            hint = "resume from an earlier one with checkpoint.ckpt_step=STEP"
            raise CheckpointError(f"checkpoint {self.path} is damaged:\n{listed}\n{hint}")


def _size_problem(file: Path, expected: CheckpointFile) -> str | None:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    return None if size == expected.bytes else f"has {size} bytes instead of {expected.bytes}"


def iteration_dir(checkpoints: Path, step: int) -> Path:
    """Megatron's folder for a step."""
    return checkpoints / f"iter_{step:07d}"


def step_of(folder: Path) -> int:
    """Return the step of a folder that `iteration_dir` has named. Raises ValueError where it has not."""
    match = _ITERATION.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not a checkpoint of a step")
    return int(match[1])


def finished(checkpoints: Path) -> list[RunCheckpoint]:
    """Return the checkpoints that were written to the end, oldest first."""
    return [RunCheckpoint(p, step) for p, step in _iterations(checkpoints) if (p / MANIFEST).is_file()]


def select(
    checkpoints: Path,
    step: int | None = None,
    *,
    within: int | None = None,
    hashes: bool = True,
    identity_hash: str | None = None,
) -> RunCheckpoint | None:
    """Return the newest finished checkpoint, or the one of `step`, verified. None when there is none at all.

    within: of no later step than this one. hashes: as for `RunCheckpoint.verify`. identity_hash: of the run.

    Raises CheckpointError when it is damaged or of another run, or when `step` was never saved.
    """
    saved = finished(checkpoints)
    if step is not None:
        chosen = next((c for c in saved if c.step == step), None)
        if chosen is None:
            steps = ", ".join(str(c.step) for c in saved) or "none"
            raise CheckpointError(
                f"{checkpoints} holds no checkpoint of checkpoint.ckpt_step={step}; finished: {steps}"
            )
    else:
        chosen = max((c for c in saved if within is None or c.step <= within), key=lambda c: c.step, default=None)
    if chosen is not None:
        chosen.verify(hashes=hashes)
        if identity_hash is not None and chosen.read_manifest().identity_hash != identity_hash:
            run = checkpoints.parent
            raise CheckpointError(
                f"{chosen.path} belongs to another run: its experiment fingerprint is not the one of {run}"
            )
    return chosen


def of_run(checkpoints: Path, step: int | None, identity_hash: str) -> RunCheckpoint:
    """Return the newest checkpoint of a run, or the one of `step`, verified. Raises CheckpointError: it has none."""
    checkpoint = select(checkpoints, step, identity_hash=identity_hash)
    if checkpoint is not None and checkpoint.read_manifest().optimizer_state == OF_FSDP:
        text = "it holds DTensors of Megatron-FSDP, which only tpi train --resume reads"
        raise CheckpointError(f"{checkpoint.path}: {text}; train with ddp.use_megatron_fsdp=false")
    if checkpoint is None:
        raise CheckpointError(f"{checkpoints.parent} has no finished checkpoint; save=STEPS lets a run write some")
    return checkpoint


def quarantine(checkpoints: Path, after: int) -> list[Path]:
    """Move what lies beyond step `after` out of the way of the saves to come, and return where it is now.

    Megatron writes into an existing folder without emptying it, so an unfinished save would mix with the next.
    """
    moved = []
    for path, step in _iterations(checkpoints):
        if step > after:
            moved.append(move_aside(path, checkpoints / ASIDE))
    return moved


def move_aside(path: Path, folder: Path) -> Path:
    """Move a folder into `folder`, under its name or the first free name after it, and return where it is now."""
    target, n = folder / path.name, 1
    while target.exists():
        n += 1
        target = folder / f"{path.name}-{n}"
    folder.mkdir(exist_ok=True)
    path.rename(target)
    return target


def write_manifest(
    path: Path,
    step: int,
    identity_hash: str,
    layout: dict[str, Any],
    optimizer_state: str,
    *,
    separate_experts: bool = False,
    known: Mapping[str, CheckpointFile] | None = None,
) -> None:
    """Describe every file of a checkpoint that has just been written, and mark it finished.

    known: path → file, of those hashed as they were written. Other arguments are as `CheckpointManifest` has them.
    """
    files = described(path, known)
    manifest = CheckpointManifest(step, identity_hash, layout, optimizer_state, separate_experts, files)
    write_atomically(path / MANIFEST, json.dumps(manifest.as_json(), indent=1))


def described(folder: Path, known: Mapping[str, CheckpointFile] | None = None) -> dict[str, CheckpointFile]:
    """Path in the folder → the file, of all files below it but its manifest. known: as for `write_manifest`."""
    paths = _paths(folder)
    files = {name: file for name, file in (known or {}).items() if name in paths}
    unknown = [name for name in paths if name not in files]
    digests = _digests([paths[name] for name in unknown])
    files |= {n: CheckpointFile(paths[n].stat().st_size, text) for n, text in zip(unknown, digests, strict=True)}
    return {name: files[name] for name in paths}


def _paths(folder: Path) -> dict[str, Path]:
    return {str(f.relative_to(folder)): f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != MANIFEST}


def _iterations(checkpoints: Path) -> list[tuple[Path, int]]:
    if not checkpoints.is_dir():
        return []
    matches = ((p, _ITERATION.fullmatch(p.name)) for p in sorted(checkpoints.iterdir()))
    return [(p, int(m[1])) for p, m in matches if m and p.is_dir()]


def _digests(files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(max(1, min(_THREADS, len(os.sched_getaffinity(0)), len(files)))) as pool:
        return list(pool.map(_digest, files))


def _digest(file: Path) -> str:
    state, block = xxhash.xxh3_128(), memoryview(bytearray(1 << 22))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            state.update(block[:size])
    return state.hexdigest()


@dataclass(frozen=True)
class Untrusted(Record):
    """After a fault. trusted: the last step whose checkpoint is trusted. hosts: of the suspects."""

    trusted: Count
    hosts: Listed[str] = field(default=())


@dataclass(frozen=True)
class Good(Record):
    """The last step that a guard has found good."""

    step: Count


def evidence_file(run_dir: "RunDir", step: int, rank: int) -> Path:
    """Return the evidence of a rank."""
    return run_dir.guard / f"step-{step}-rank-{rank}{SUFFIX}"


def distrust(run_dir: "RunDir", untrusted: Untrusted) -> None:
    """Note, before the run ends, which checkpoints are not trusted. Raises OSError."""
    run_dir.guard.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.guard / UNTRUSTED, json.dumps(untrusted.as_json()))


def unsettled(run_dir: "RunDir") -> Untrusted | None:
    """Return what was noted since the last `settle`; None: nothing. CheckpointError: it is damaged."""
    file = run_dir.guard / UNTRUSTED
    try:
        return checked(Untrusted, parse_json(read_limited(file, MIB))) if file.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: which checkpoints are trusted cannot be read: {error}") from error


def settle(run_dir: "RunDir") -> Untrusted | None:
    """Set untrusted checkpoints aside, and return what was noted. CheckpointError: it cannot be read."""
    untrusted = unsettled(run_dir)
    if untrusted is not None:
        quarantine(run_dir.checkpoints, after=untrusted.trusted)
        (run_dir.guard / UNTRUSTED).unlink()
    return untrusted


def write_good(run_dir: "RunDir", step: int) -> None:
    """Note a good step. Raises OSError."""
    run_dir.guard.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir.guard / "good.json", json.dumps(Good(step).as_json()))


def read_good(run_dir: "RunDir", start: int) -> int:
    """Return the last step, up to the one that a run goes on from, that a guard has found good; 0: none is known."""
    with suppress(OSError, ValueError):
        good = checked(Good, parse_json(read_limited(run_dir.guard / "good.json", MIB)))
        return good.step if good.step <= start else 0
    return 0
