# SPDX-License-Identifier: Apache-2.0
"""The user's cache: kept answers, stamps of their sources, and Python's bytecode."""

import importlib
import os
import py_compile
import sys

import pytest

from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.start import cache

ROWS = {"rows": [1, "two", None]}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a.py", "b.yaml"):
        (tmp_path / name).write_text(name)
    return tmp_path / "cache"


def test_what_is_kept_is_read_as_written(folder):
    cache.keep("rows", ROWS)
    assert cache.find("rows") == ROWS
    (folder / "tpi/rows.json").write_text("{")
    with pytest.raises(ValueError):
        cache.find("rows")


def test_a_cache_that_cannot_be_written_costs_time_only(folder):
    folder.write_text("a file")
    cache.keep("rows", ROWS)
    with pytest.raises(OSError):
        cache.find("rows")


CHANGES = {
    "another size": lambda folder: (folder / "a.py").write_text("longer"),
    "another time": lambda folder: os.utime(folder / "b.yaml", ns=(1, 1)),
    "no file": lambda folder: (folder / "a.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_stamp(folder, tmp_path, change):
    sources = [tmp_path / name for name in ("a.py", "b.yaml")]
    before = cache.stamp(sources)
    assert cache.stamp(reversed(sources)) == before != cache.stamp(sources[:1])
    CHANGES[change](tmp_path)
    assert cache.stamp(sources) != before


def test_the_models_come_from_both_trees_and_the_package(here, monkeypatch, tmp_path):
    mine = tmp_path / "config/tpi/model"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    names = {path.name for path in conf_files.sources()}
    assert {"own.yaml", "qwen3_8b.yaml", "layout.py"} <= names


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package without bytecode, which alone is looked at, where Python writes bytecode."""
    source = tmp_path / "a_package_of_a_test" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "PACKAGES", (source.parent.name, "not_installed_anywhere", "not_installed.at_all"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield source
    sys.modules.pop(source.parent.name, None)


@pytest.mark.parametrize("prefix", (None, "cache"))
def test_bytecode_that_python_may_not_write(own_package, tmp_path, monkeypatch, prefix):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", prefix and str(tmp_path / prefix))
    assert cache.packages_without_bytecode() == [own_package.parent.name]
    py_compile.compile(str(own_package))
    assert cache.packages_without_bytecode() == []


def test_it_is_kept_in_a_folder_of_tpi(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert cache.keep_bytecode() == cache.bytecode_folder()
    importlib.import_module(own_package.parent.name)
    [kept] = cache.bytecode_folder().rglob("*.pyc")
    assert kept.is_relative_to(f"{cache.bytecode_folder()}{own_package.parent}")
    assert not list(own_package.parent.rglob("*.pyc"))
    assert cache.packages_without_bytecode() == []


def test_a_cache_that_cannot_be_written(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert cache.keep_bytecode() is None
