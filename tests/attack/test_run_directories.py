# SPDX-License-Identifier: Apache-2.0
"""Run directories with a damaged file: every command that reads them ends with a table, a difference or one message.

A damaged checkpoint is never resumed from.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tp_invariant_recipes.runs.checkpoints import MANIFEST

SEED = 31
FEW, ALL = 15, 450

COMMANDS = (
    "runs .", "runs . --json", "compare run other", "compare other run --json",
    "report run other --out page.html --force", "certify run --out a.tpicert", "show --from run",
    "train --resume run iters=6 --dry-run", "check run --step 1", "export run out --step 3",
    "submit --resume run --dry-run", "verify --recheck run",
)  # fmt: skip
FILES = ("config.yaml", "run.json", "environment.json", "versions.json", "ledger.jsonl", "progress.jsonl", "write.lock")
FILES += ("logs", "logs/rank-0.log", "checkpoints", "checkpoints/iter_0000004", f"checkpoints/iter_0000004/{MANIFEST}")
FILES += ("submission.json", "matrix.json", "verify.json", "tensorboard", "index-cache", "job.ended")


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _torn(path: Path, rng: random.Random) -> None:
    data = path.read_bytes() if path.is_file() else b'{"a": 1}\n'
    _gone(path)
    path.write_bytes(data[: rng.randrange(len(data) or 1)])


def _flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() if path.is_file() else b'{"a": 1}\n') or bytearray(b"x")
    _gone(path)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _replaced(make: Callable[[Path, random.Random], object]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, rng: random.Random) -> None:
        _gone(path)
        make(path, rng)

    return damage


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "missing": lambda path, rng: _gone(path),
    "torn": _torn,
    "torn elsewhere": _torn,
    "a flipped bit": _flipped,
    "another flipped bit": _flipped,
    "empty": _replaced(lambda path, rng: path.touch()),
    "a FIFO": _replaced(lambda path, rng: os.mkfifo(path)),
    "a folder": _replaced(lambda path, rng: path.mkdir()),
    "a loop of links": _replaced(lambda path, rng: path.symlink_to(path.name)),
    "a link to nothing": _replaced(lambda path, rng: path.symlink_to("nothing")),
    "a link to a device": _replaced(lambda path, rng: path.symlink_to("/dev/zero")),
    "random bytes": _replaced(lambda path, rng: path.write_bytes(rng.randbytes(300))),
    "zeros": _replaced(lambda path, rng: path.write_bytes(bytes(5000))),
    "other JSON": _replaced(lambda path, rng: path.write_bytes(rng.choice((b"[]", b"1", b"null", b'"x"', b"{}")))),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", (FEW, pytest.param(ALL, marks=pytest.mark.release)))
def test_a_damaged_file_is_one_message(attack, run, monkeypatch, count):
    monkeypatch.setenv("PATH", str(run.absolute()))
    rng, wrong = random.Random(SEED), {}
    cases = [(file, damage) for file in FILES for damage in DAMAGES]
    for file, damage in rng.sample(cases * 2, count):
        shutil.rmtree(run)
        shutil.copytree("other", run)
        DAMAGES[damage](run / file, rng)
        command = rng.choice(COMMANDS)
        if result := attack(*command.split(), allowed=(0, 1, 2) if command.startswith("compare") else (0, 2)):
            wrong[f"{file} is {damage}: {command}"] = result
    assert wrong == {}


TENSORS = ("__0_0.distcp", ".metadata", "metadata.json", "train_state.pt", "run_config.yaml")
RESUME = ("train", "--resume", "run", "iters=6", "--dry-run")
FEW_DAMAGES = (TENSORS[0], ("missing", "torn", "a flipped bit"))
ALL_DAMAGES = (pytest.param(file, tuple(DAMAGES), marks=pytest.mark.release) for file in TENSORS)


@pytest.mark.parametrize("file, damages", (FEW_DAMAGES, *ALL_DAMAGES))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_not(attack, run, file, damages):
    rng = random.Random(SEED)
    for damage in damages:
        shutil.rmtree(run)
        shutil.copytree("other", run)
        DAMAGES[damage](run / "checkpoints" / "iter_0000004" / file, rng)
        assert attack(*RESUME, allowed=(2,)) is None, damage
        assert attack(*RESUME, "checkpoint.ckpt_step=2", allowed=(0,)) is None, damage


def test_a_checkpoint_without_a_manifest_is_unfinished(attack, cli, run):
    assert attack(*RESUME, allowed=(0,)) is None
    (run / "checkpoints" / "iter_0000004" / MANIFEST).unlink()
    assert "from step 2" in cli(*RESUME).out
