"""Packages that Python compiles again at every start."""

import os
import py_compile
import sys

import pytest

from tp_invariant_recipes.host import bytecode
from tp_invariant_recipes.workflows import doctor


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package without bytecode, which alone is looked at, where Python writes bytecode."""
    source = tmp_path / "a_package_of_a_test" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bytecode, "PACKAGES", (source.parent.name, "not_installed_anywhere", "not_installed.at_all"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return source


def test_bytecode_that_will_be_written_is_not_missing(own_package):
    assert bytecode.packages_without_bytecode() == []
    assert doctor._bytecode().state == "ok"


def test_bytecode_that_python_may_not_write(own_package, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert bytecode.packages_without_bytecode() == [own_package.parent.name]
    finding = doctor._bytecode()
    assert (finding.found, finding.state) == (None, "optional")
    assert f"compiles {own_package.parent.name} again" in finding.advice
    py_compile.compile(str(own_package))
    assert bytecode.packages_without_bytecode() == []


def test_bytecode_in_a_folder_that_is_read_only(own_package, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda folder, mode: asked.append(folder) or False)
    assert bytecode.packages_without_bytecode() == [own_package.parent.name]
    assert asked == [own_package.parent]


def test_a_folder_for_all_bytecode_counts(own_package, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    assert bytecode.packages_without_bytecode() == [own_package.parent.name]
    py_compile.compile(str(own_package))
    assert bytecode.packages_without_bytecode() == []


def test_nothing_is_imported(own_package):
    bytecode.packages_without_bytecode()
    assert own_package.parent.name not in sys.modules
