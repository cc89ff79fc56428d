# SPDX-License-Identifier: Apache-2.0
"""The manifest of a run's index cache: what a killed or damaged attempt leaves is built again, with the same bytes."""

import json
import os
from pathlib import Path

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs import run_dir
from tp_invariant_recipes.runs.checkpoints import MANIFEST

BUILT = {"a-shuffle_index.npy": b"3120" * 100, "a-sample_index.npy": b"0123" * 200, "deep/er/b.jsonl.idx.npy": b"07"}
SHUFFLE = "a-shuffle_index.npy"


def build(cache: Path) -> None:
    """As Megatron: only files that are not there."""
    for name, data in BUILT.items():
        if not (file := cache / name).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)


@pytest.fixture
def cache(tmp_path) -> Path:
    """A cache that an attempt has recorded."""
    assert run_dir.remove_unrecorded(tmp_path / "index-cache") == []  # there is none yet
    build(tmp_path / "index-cache")
    run_dir.record(tmp_path / "index-cache")
    return tmp_path / "index-cache"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {"torn": lambda file: os.truncate(file, 7), "flipped": flip, "empty": lambda file: os.truncate(file, 0)}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", BUILT)
def test_a_damaged_file_is_removed_and_no_other(cache, damage, name):
    DAMAGE[damage](cache / name)
    assert run_dir.remove_unrecorded(cache) == [name]
    build(cache)
    run_dir.record(cache)
    assert {name: (cache / name).read_bytes() for name in BUILT} == BUILT


def test_what_a_killed_attempt_has_built_is_not_kept(cache):
    """It wrote no manifest, or not this file's name: of another length of the run, say."""
    (cache / "longer-shuffle_index.npy").write_bytes(b"half")
    assert run_dir.remove_unrecorded(cache) == ["longer-shuffle_index.npy"]
    (cache / MANIFEST).unlink()
    assert sorted(run_dir.remove_unrecorded(cache)) == sorted(BUILT)


def test_a_file_that_is_rebuilt_with_other_contents_is_refused(cache):
    """As by another version of numpy: the run would read other samples."""
    (cache / SHUFFLE).unlink()
    (cache / SHUFFLE).write_bytes(b"0123" * 100)
    with pytest.raises(RunError, match=rf"builds {SHUFFLE} with other contents than this run has trained with"):
        run_dir.record(cache)


def test_files_of_earlier_lengths_stay_recorded(cache):
    (cache / SHUFFLE).unlink()
    (cache / "longer-shuffle_index.npy").write_bytes(b"31204")
    run_dir.record(cache)
    assert {SHUFFLE, "longer-shuffle_index.npy"} < json.loads((cache / MANIFEST).read_text())["files"].keys()
