# SPDX-License-Identifier: Apache-2.0
"""The table of Bridge's fields: it answers without Bridge, counts only for the Bridge it came from, may be missing."""

import dataclasses
import os
import sys
import types
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import conf_files, field_table, schema

SETTINGS = {"steps": int, "rate": float | None, "kind": Literal["a", "b"] | None, "on": bool, "name": str, "other": Any}
DIGEST = field_table._digest


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package in Bridge's place with one class, Settings; the table's places are empty folders."""
    folder = tmp_path / "bridge"
    folder.mkdir()
    (folder / "settings.py").write_text("class Settings: ...\n")
    module = types.ModuleType("megatron.bridge.settings")
    module.__file__ = str(folder / "settings.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(field_table, "_folder", lambda package: folder)
    monkeypatch.setattr(field_table, "_digest", DIGEST)
    monkeypatch.setattr(field_table, "of_the_locks", lambda: tmp_path / "locks" / "table.json")
    return folder


def written_table(file: Path) -> dict[str, Any]:
    cls = dataclasses.make_dataclass("Settings", SETTINGS, module="megatron.bridge.settings")
    field_table.write(file, {"megatron.bridge.settings.Settings": (cls, SETTINGS)})
    return dict(field_table.read())


@pytest.mark.parametrize("place", (field_table.in_cache, lambda: field_table.of_the_locks()), ids=("cache", "locks"))
def test_it_counts_while_bridge_has_the_bytes_that_it_was_made_from(package, place):
    source, rows = package / "settings.py", {"megatron.bridge.settings.Settings": SETTINGS | {"other": None}}
    assert written_table(place()) == rows
    source.touch()
    assert field_table.read() == rows
    source.write_text(source.read_text().replace("...", "0.."))  # as long as before
    os.utime(source, ns=(1, 1))
    assert field_table.read() == {}
    assert written_table(field_table.in_cache()) == rows
    source.unlink()
    assert field_table.read() == {}


DAMAGED = ("", "{", "[]", '{"sources": {}}', '{"sources": {}, "classes": {"a": {"b": ["complex"]}}}', "\xff" * 10)
DAMAGED += ('{"sources": {"etc/passwd": [1, 2]}, "classes": {}}', "[" * 100000, '{"sources": {"a": 1}, "classes": {}}')


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_none(package, text):
    file = field_table.in_cache()
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("latin-1"))
    assert field_table.read() == {}


def test_every_provider_of_a_model_is_in_it():
    files = [*(conf_files.conf_dir() / "model").glob("*.yaml")]
    targets = {line.split()[-1] for f in files for line in f.read_text().splitlines() if "_target_:" in line}
    assert targets == set(schema.PROVIDERS)
    assert {*schema.BRIDGE_SECTIONS.values(), schema.MIXED_PRECISION} - {schema.PROVIDER} <= field_table.read().keys()


# These compose in a folder of tests that lets nobody import Bridge.
TYPOS = (
    ("model.num_layer=3", "model.num_layer: no such field of GPTModelProvider; did you mean 'model.num_layers'?"),
    (
        "optimizer.clip_gard=1",
        "optimizer.clip_gard: no such field of OptimizerConfig; did you mean 'optimizer.clip_grad'?",
    ),
    ("profiling.use_nsys=1", "profiling.use_nsys: no such field of ProfilingConfig"),
    ("mixed_precision.bf17=true", "mixed_precision.bf17=true: mixed_precision=bf16_mixed is a preset"),
    ("model.num_layers=abc", "model.num_layers=abc: expected int, such as 4"),
    ("ddp.overlap_grad_reduce=2", "ddp.overlap_grad_reduce=2: expected bool, such as true"),
    ("model.transformer_impl=locl", "model.transformer_impl=locl: expected one of"),
    ('model.num_layers="-3"', "model.num_layers=-3: must be at least 1"),
)


@pytest.mark.parametrize("override, says", TYPOS, ids=[row[0] for row in TYPOS])
def test_a_typo_needs_no_bridge(override, says):
    (problem,) = problems_of(override)
    assert problem.startswith(says)


@pytest.mark.parametrize("override", ("model.num_layer=3", "model.activation_func=nope", "model._target_=other.Model"))
def test_what_the_table_cannot_answer_is_asked_of_bridge(monkeypatch, override):
    def load() -> None:
        raise ConfigError("Bridge was asked")

    if override == "model.num_layer=3":
        monkeypatch.setattr(field_table, "read", dict)
    schema.bridge_class.cache_clear()
    monkeypatch.setattr(schema.bridge, "load", load)
    assert problems_of(override) == ["Bridge was asked"]
