# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints can be trusted: finished, whole, unaltered; and the rest is out of the way."""

import os
from pathlib import Path

import pytest

from tp_invariant_recipes.errors import CheckpointError
from tp_invariant_recipes.runs.checkpoints import (
    ASIDE,
    MANIFEST,
    CheckpointFile,
    RunCheckpoint,
    finished,
    iteration_dir,
    quarantine,
    select,
    write_manifest,
)

FILES = {"__0_0.distcp": b"weights of rank 0", "__1_0.distcp": b"weights of rank 1", "run_config/run.yaml": b"a: 1\n"}
LAYOUT = {"tp": 2, "sp": True}


def save(folder: Path, step: int, files: dict[str, bytes] = FILES, *, manifest: bool = True) -> Path:
    path = iteration_dir(folder, step)
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    if manifest:
        write_manifest(path, step, "hash", LAYOUT, "distributed")
    return path


def selection_problems(folder: Path) -> list[str]:
    """What `select` says is wrong with the newest checkpoint, one entry a file."""
    with pytest.raises(CheckpointError) as error:
        select(folder)
    first, *wrong, last = str(error.value).splitlines()
    assert first.startswith("checkpoint ")
    assert first.endswith(" is damaged:")
    assert last == "resume from an earlier one with checkpoint.ckpt_step=STEP"
    return [line.removeprefix("  - ") for line in wrong]


def test_a_manifest_says_what_was_written(tmp_path):
    path = save(tmp_path, 7)
    manifest = RunCheckpoint(path, 7).read_manifest()
    assert {key: getattr(manifest, key) for key in ("schema", "step", "identity_hash", "layout")} == {
        "schema": 1, "step": 7, "identity_hash": "hash", "layout": LAYOUT,
    }  # fmt: skip
    assert {name: entry.bytes for name, entry in manifest.files.items()} == {n: len(c) for n, c in FILES.items()}
    assert sorted(p.name for p in path.iterdir() if p.is_file()) == sorted([MANIFEST, "__0_0.distcp", "__1_0.distcp"])
    assert select(tmp_path) == RunCheckpoint(path, 7)
    text = (path / MANIFEST).read_text()
    assert text.count("\n") > 5  # people read it
    write_manifest(path, 7, "hash", LAYOUT, "distributed")
    assert (path / MANIFEST).read_text() == text


def test_the_newest_finished_one_is_chosen_or_the_one_asked_for(tmp_path):
    paths = {step: save(tmp_path, step) for step in (100, 20, 3)}
    save(tmp_path, 200, manifest=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("200")
    (tmp_path / "iter_0000300").write_text("a file")
    (tmp_path / "iter_400").mkdir()
    assert [c.step for c in finished(tmp_path)] == [3, 20, 100]
    assert paths[20].name == "iter_0000020"  # as Megatron's
    assert select(tmp_path) == RunCheckpoint(paths[100], 100)
    assert select(tmp_path, 20) == RunCheckpoint(paths[20], 20)
    assert select(tmp_path, within=99) == RunCheckpoint(paths[20], 20)
    assert select(tmp_path, within=2) is None
    assert select(tmp_path / "nowhere") is None


def test_a_step_that_was_never_finished_is_refused_with_those_that_were(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint of checkpoint\.ckpt_step=5; finished: none"):
        select(tmp_path, 5)
    for step in (10, 20):
        save(tmp_path, step)
    save(tmp_path, 5, manifest=False)
    with pytest.raises(CheckpointError, match=r"no checkpoint of checkpoint\.ckpt_step=5; finished: 10, 20"):
        select(tmp_path, 5)


def test_each_damaged_file_is_named(tmp_path):
    path = save(tmp_path, 5, FILES | {"whole": b"whole"})
    (path / "__0_0.distcp").unlink()
    (path / "__1_0.distcp").write_bytes(b"weights of rank")
    (path / "run_config/run.yaml").write_bytes(b"a: 2\n")
    assert selection_problems(tmp_path) == [
        "__0_0.distcp is missing",
        "__1_0.distcp has 15 bytes instead of 17",
        "run_config/run.yaml has changed since it was written",
    ]
    save(tmp_path, 4)
    assert select(tmp_path, 4).step == 4


def test_nodes_read_all_files_between_them_and_each_its_part(tmp_path):
    path = save(tmp_path, 5, {str(n): bytes(n + 1) for n in range(7)})
    for n in range(7):
        (path / str(n)).write_bytes(b"\1" * (n + 1))
    results = []
    for node in range(3):
        with pytest.raises(CheckpointError) as error:
            RunCheckpoint(path, 5).verify(node=node, nodes=3)
        results.append({line.split()[1] for line in str(error.value).splitlines() if "has changed" in line})
    assert [len(names) for names in results] == [3, 2, 2]
    assert set.union(*results) == set(map(str, range(7)))


def test_sizes_alone_find_a_short_file_and_no_flipped_byte(tmp_path):
    path = save(tmp_path, 5)
    (path / "__0_0.distcp").write_bytes(b"Weights of rank 0")
    assert select(tmp_path, hashes=False) == RunCheckpoint(path, 5)
    (path / "__0_0.distcp").write_bytes(b"weights of rank")
    with pytest.raises(CheckpointError, match="has 15 bytes instead of 17"):
        select(tmp_path, hashes=False)


def test_a_file_that_was_hashed_as_it_was_written_is_not_read_back(tmp_path):
    path = save(tmp_path, 5, manifest=False)
    known = {"__0_0.distcp": CheckpointFile(17, "0" * 32), "gone": CheckpointFile(1, "1" * 32)}
    write_manifest(path, 5, "hash", LAYOUT, "distributed", known=known)
    files = RunCheckpoint(path, 5).read_manifest().files
    assert files["__0_0.distcp"] == known["__0_0.distcp"]
    assert set(files) == set(FILES)
    assert selection_problems(tmp_path) == ["__0_0.distcp has changed since it was written"]


def test_a_half_written_manifest_does_not_finish_a_checkpoint(tmp_path, monkeypatch):
    path = save(tmp_path, 5, manifest=False)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        write_manifest(path, 5, "hash", LAYOUT, "distributed")
    assert finished(tmp_path) == []


def test_what_lies_beyond_the_start_is_set_aside(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 30, manifest=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    aside = tmp_path / ASIDE
    assert quarantine(tmp_path, after=10) == [aside / "iter_0000020", aside / "iter_0000030"]
    assert [c.step for c in finished(tmp_path)] == [10]
    assert (aside / "iter_0000020" / "__0_0.distcp").read_bytes() == FILES["__0_0.distcp"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists()
    assert quarantine(tmp_path, after=10) == quarantine(tmp_path / "nowhere", after=0) == []


def test_what_is_set_aside_twice_does_not_replace_the_first(tmp_path):
    for content in (b"first", b"second", b"third"):
        save(tmp_path, 20, {"file": content})
        quarantine(tmp_path, after=0)
    kept = {path.parent.name: path.read_bytes() for path in (tmp_path / ASIDE).rglob("file")}
    assert kept == {"iter_0000020": b"first", "iter_0000020-2": b"second", "iter_0000020-3": b"third"}
