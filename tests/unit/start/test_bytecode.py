"""Packages that Python compiles again at every start."""

import importlib
import os
import py_compile
import sys

import pytest

from tp_invariant_recipes.start import bytecode


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package without bytecode, which alone is looked at, where Python writes bytecode."""
    source = tmp_path / "a_package_of_a_test" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bytecode, "PACKAGES", (source.parent.name, "not_installed_anywhere", "not_installed.at_all"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield source
    sys.modules.pop(source.parent.name, None)


def test_bytecode_that_will_be_written_is_not_missing(own_package):
    assert bytecode.packages_without_bytecode() == []


@pytest.mark.parametrize("prefix", (None, "cache"))
def test_bytecode_that_python_may_not_write(own_package, tmp_path, monkeypatch, prefix):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", prefix and str(tmp_path / prefix))
    assert bytecode.packages_without_bytecode() == [own_package.parent.name]
    py_compile.compile(str(own_package))
    assert bytecode.packages_without_bytecode() == []


def test_bytecode_in_a_folder_that_is_read_only(own_package, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda folder, mode: asked.append(folder) or False)
    assert bytecode.packages_without_bytecode() == [own_package.parent.name]
    assert asked == [own_package.parent]


def test_it_is_kept_in_a_folder_of_tpi(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode.keep() == bytecode.folder()
    importlib.import_module(own_package.parent.name)
    [kept] = bytecode.folder().rglob("*.pyc")
    assert kept.is_relative_to(f"{bytecode.folder()}{own_package.parent}")
    assert not list(own_package.parent.rglob("*.pyc"))
    assert bytecode.packages_without_bytecode() == []


def test_bytecode_that_python_keeps_stays_where_it_is(own_package):
    assert bytecode.keep() is None
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (None, False)


def test_a_folder_that_the_user_has_chosen_stays(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", "chosen")
    assert bytecode.keep() is None
    assert sys.pycache_prefix == "chosen"


def test_a_cache_that_cannot_be_written(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert bytecode.keep() is None


def test_nothing_is_imported(own_package):
    bytecode.packages_without_bytecode()
    assert own_package.parent.name not in sys.modules
