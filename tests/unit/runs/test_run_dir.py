# SPDX-License-Identifier: Apache-2.0
"""A run directory is never overwritten, and each of its files is whole or not there."""

import errno
import json
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import yaml

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs import run_dir
from tp_invariant_recipes.runs.run_dir import RunDir, choose


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """The current directory, empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def tree_of_files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_run_gets_a_name_of_its_own(empty_folder, monkeypatch):
    monkeypatch.setattr(run_dir.time, "strftime", lambda form: "20260102-030405")
    chosen = []
    for _ in range(3):
        chosen.append(choose(None, "qwen3_toy-tp2").path)
        chosen[-1].mkdir(parents=True)
    assert [str(path) for path in chosen] == [
        "runs/qwen3_toy-tp2-20260102-030405",
        "runs/qwen3_toy-tp2-20260102-030405-2",
        "runs/qwen3_toy-tp2-20260102-030405-3",
    ]


def test_the_directory_asked_for_is_taken_if_it_holds_nothing(empty_folder):
    (empty_folder / "empty").mkdir()
    assert choose("empty", "name").path == choose("empty/", "name").path
    assert str(choose("new/one", "name").path) == "new/one"
    assert tree_of_files(empty_folder) == ["empty"]  # choosing makes nothing


@pytest.mark.parametrize("content", ("file", ".hidden", "folder/", "config.yaml"))  # of a run only beside its lock
def test_a_directory_that_holds_something_is_refused(empty_folder, content):
    target = empty_folder / "run" / content
    target.parent.mkdir()
    target.mkdir() if content.endswith("/") else target.touch()
    with pytest.raises(RunError, match=r"run\.dir=run is not empty: choose another"):
        choose("run", "name")


BEGUN = ("write.lock", "config.yaml", "environment.json", ".versions.json.12.new")  # of a launcher killed as it began


def test_what_a_killed_launcher_wrote_before_it_began_is_in_nobodys_way(empty_folder):
    target = empty_folder / "run"
    target.mkdir()
    for name in BEGUN:
        (target / name).touch()
        assert choose("run", "name").path == RunDir(target.relative_to(empty_folder)).path
    (target / "run.json").touch()
    with pytest.raises(RunError, match=r"is not empty: continue it \(--resume run\) or choose another"):
        choose("run", "name")


def test_a_file_is_refused(empty_folder):
    (empty_folder / "run").touch()
    with pytest.raises(RunError, match=r"run\.dir=run is a file"):
        choose("run", "name")
    with pytest.raises(RunError, match=r"run\.dir=run/a/b: \S+/run is a file, not a directory"):
        choose("run/a/b", "name")


def test_a_directory_that_cannot_be_written_is_refused(empty_folder, monkeypatch):
    (empty_folder / "theirs").mkdir()
    monkeypatch.setattr(run_dir.os, "access", lambda path, mode: path.name != "theirs")
    for name in ("theirs", "theirs/a/b"):
        with pytest.raises(RunError, match=rf"run\.dir={name}: \S*theirs cannot be written; choose another"):
            choose(name, "name")
    assert choose("ours", "name").path.name == "ours"
    with pytest.raises(RunError, match="File name too long"):
        choose("x" * 300, "name")


def test_files_are_what_other_programs_read(empty_folder):
    """In the order in which they are written. YAML has infinities, JSON has none."""
    config, versions = {"b": 1, "a": {"z": None, "c": math.inf}}, {"torch": None, "é": [1, {"b": None}]}
    run = RunDir(empty_folder / "run")
    run.write(run.config, config)
    run.write(run.versions, versions)
    assert run.config.read_text() == "b: 1\na:\n  z: null\n  c: .inf\n"
    assert run.versions.read_text().startswith('{\n  "torch": null,\n')
    assert run.read_config() == yaml.safe_load(run.config.read_text()) == config
    assert json.loads(run.versions.read_text()) == versions
    assert tree_of_files(empty_folder / "run") == ["config.yaml", "versions.json"]


def test_a_full_disk_is_reported_with_what_is_free_and_what_to_change(empty_folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    monkeypatch.setattr(os, "fsync", lambda d: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
    with pytest.raises(RunError) as error:
        RunDir(empty_folder).write(RunDir(empty_folder).run, {})
    why = f"the disk is full: 1.0 MiB are free for {empty_folder}; set run.dir=PATH"
    assert str(error.value) == f"cannot write {empty_folder}/run.json: {why}"


@pytest.mark.parametrize("content", (None, "{", "[1", "\x00"), ids=("missing", "cut", "cut list", "garbage"))
def test_what_is_no_run_directory_is_reported(empty_folder, content):
    run = RunDir(empty_folder)
    for path, read in ((run.config, run.read_config), (run.run, run.read_run)):
        if content is not None:
            path.write_text(content)
        with pytest.raises(RunError, match=rf"is not a run directory: {path.name}: "):
            read()
