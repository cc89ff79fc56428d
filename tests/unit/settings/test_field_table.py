# SPDX-License-Identifier: Apache-2.0
"""The table of Bridge's fields: it answers without Bridge, counts only for the Bridge it came from, may be missing."""

import dataclasses
import sys
import types
from typing import Any, Literal

import pytest

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import conf_files, field_table, schema

SETTINGS = {"steps": int, "rate": float | None, "kind": Literal["a", "b"] | None, "on": bool, "name": str, "other": Any}
PATH = "megatron.bridge.settings.Settings"
DIGEST = field_table._digest


def test_it_counts_while_bridge_has_the_bytes_that_it_was_made_from(tmp_path, monkeypatch):
    module = types.ModuleType("megatron.bridge.settings")
    module.__file__ = str(tmp_path / "settings.py")
    source = tmp_path / "settings.py"
    source.write_text("class Settings: ...\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(field_table, "_folder", lambda package: tmp_path)
    monkeypatch.setattr(field_table, "_digest", DIGEST.__wrapped__)
    monkeypatch.setattr(field_table, "FIELDS", tmp_path / "table.json")
    monkeypatch.setattr(field_table, "table", field_table.table.__wrapped__)
    cls = dataclasses.make_dataclass("Settings", SETTINGS, module="megatron.bridge.settings")
    field_table.write(tmp_path / "table.json", {PATH: (cls, SETTINGS)})
    for text, counts in (("class Settings: ...\n", True), ("class Settings: 0..\n", False), (None, False)):
        source.unlink()
        if text is not None:
            source.write_text(text)
        assert field_table.read() == ({PATH: SETTINGS | {"other": None}} if counts else {})
    monkeypatch.setattr(field_table.needed, "there", lambda module: False)  # without Bridge it is the best there is
    assert field_table.read().keys() == {PATH}


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
