# SPDX-License-Identifier: Apache-2.0
"""The catalogue against the classes that are installed: an upgrade that adds a field fails here. The table of Bridge's
fields against Bridge itself. Bridge's fields that the documents name are fields of the installed Bridge.
scripts/gpu: every row composes for the GPUs that it names.
"""

import dataclasses
import json
import math
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.fields.catalogue import SECTIONS, refused, values_of
from tp_invariant_recipes.fields.field import ANY, NONE
from tp_invariant_recipes.fields.model import KNOWN
from tp_invariant_recipes.settings import field_table, schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.sections import OWN_KEYS
from tp_invariant_recipes.settings.values import WrongType, convert, describe
from tp_invariant_recipes.sources import recipe_fields

pytestmark = pytest.mark.usefixtures("bridge")

# Defaults of Bridge's that are not allowed: conf/config.yaml sets these fields.
SET_BY_CONF = {"ddp": {"grad_reduce_in_fp32"}, "dataset": {"reset_position_ids", "eod_mask_loss"}}
# Fields without a default.
REQUIRED = {"comm_overlap": {"tp_comm_overlap": False}, "dataset": {"random_seed": 1, "seq_length": 32}}
# What else a container has. `mixed_precision` is one name, and a table has the fields of `model`.
OTHER_SECTIONS = {"model", "mixed_precision", *recipe_fields.OTHER_FIELDS}


def classes(section: str) -> list[type]:
    """The classes of a section: examples have another one."""
    own = schema.section_class(section, {section: {}})
    return [own, schema.bridge_class(schema.SFT_DATASET)] if section == "dataset" else [own]


def defaults(section: str, cls: type) -> dict:
    required = {name: value for name, value in REQUIRED.get(section, {}).items() if name in schema.fields(cls)}
    return values_of(cls(**required))


def test_every_section_of_a_container_has_a_table():
    from megatron.bridge.training.config import ConfigContainer

    assert {field.name for field in dataclasses.fields(ConfigContainer)} == SECTIONS.keys() | OTHER_SECTIONS


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_has_a_row_for_every_field_of_the_installed_classes_and_no_other(section):
    installed = {name for cls in classes(section) for name in schema.fields(cls)}
    named = {name for name, field in SECTIONS[section].named.items() if field.allowed is not NONE}
    assert named <= installed
    assert named == installed or SECTIONS[section].otherwise.allowed is ANY


@pytest.mark.parametrize("section", SECTIONS)
def test_a_field_that_nobody_sets_is_allowed(section):
    for cls in classes(section):
        given = defaults(section, cls)
        problems = refused(section, given, lambda *_: False)  # no default is allowed but by its row
        wrong = {problem.key.partition("=")[0].partition(".")[2] for problem in problems}
        assert wrong == SET_BY_CONF.get(section, set()) & given.keys()
        assert wrong <= compose("qwen3_toy").config.sections.get(section, {}).keys()


@pytest.mark.parametrize("path", schema.PROVIDERS)
def test_a_model_with_the_defaults_of_its_class_has_no_unknown_field(path):
    """Fields without a row among them; one that is changed is refused by its name."""
    cls = schema.bridge_class(path)
    given = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING and f.init}
    sections = compose("qwen3_toy").config.sections
    model = {"_target_": path, **{name: value for name, value in given.items() if name[0] != "_"}}
    known = {name: model[name] for name in KNOWN & model.keys()}
    given = {problem.key for problem in refused("model", known, lambda *_: False)}
    assert {problem.key for problem in invariance._fields(RunConfig(sections | {"model": model}))} == given
    without = [name for name in model if name not in KNOWN and name != "_target_"]
    changed = RunConfig(sections | {"model": model | dict.fromkeys(without, math.inf)})
    others = {f"model.{name}=inf" for name in without}
    assert {problem.key for problem in invariance._fields(changed)} == given | others
    assert any(model[name] for name in without)  # such as a default that is on


def test_what_the_one_precision_sets_in_a_model_is_known():
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    mixed = get_mixed_precision_config("bf16_mixed")
    of_a_model = {name for path in schema.PROVIDERS for name in schema.fields(schema.bridge_class(path))}
    given = {name for name, value in values_of(mixed).items() if value}
    assert given & of_a_model <= KNOWN


def test_the_fields_of_a_model_that_are_known_are_fields_of_the_installed_providers():
    trees = [{"model": {"_target_": name}} for name in schema.PROVIDERS]
    installed = {name for tree in trees for name in schema.fields(schema.section_class("model", tree))}
    assert KNOWN - installed == set()


VALUES = (True, 0, 3, -1, 1.5, "3", "x", "auto", None, [1], {"a": 1})


def taken(value, hint):
    try:
        return repr(convert(value, hint))
    except WrongType:
        return "refused"


def test_the_table_says_what_bridge_says():
    table = field_table.read()
    assert len(table) == len(schema.BRIDGE_SECTIONS) + len(schema.PROVIDERS)
    for path, fields in table.items():
        hints = schema.fields(schema._located(path))
        assert fields.keys() == hints.keys(), path
        for name, hint in fields.items():
            if hint is not None:
                assert describe(hint) == describe(hints[name]), f"{path}.{name}"
                assert [taken(v, hint) for v in VALUES] == [taken(v, hints[name]) for v in VALUES], f"{path}.{name}"


def test_the_table_beside_the_module_is_that_of_the_lock(tmp_path):
    """If this fails after an upgrade, write the new table into the file: with it, a typo shows before any import."""
    schema.write_field_table(tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == json.loads(field_table.FIELDS.read_text())


NAMED = re.compile(rf"(?<![\w./@-])({'|'.join(schema.BRIDGE_SECTIONS)})\.([a-z]\w*)(?![\w/(.])")  # no file, no call
MODELS = ("qwen3_toy", "nemotron3_nano_toy", "moonlight_toy")  # of each provider one


def named(text: str) -> set[tuple[str, str]]:
    others = ("py", "md", "json", "jsonl", "yaml", "step")  # endings of files; torch's optimizer.step
    return {(section, field) for section, field in NAMED.findall(text) if field not in others}


@cache
def known() -> frozenset[tuple[str, str]]:
    """Every `section` and `field` of some model's configuration."""
    results = set()
    trees = [compose(model, device="gpu").config.sections for model in MODELS]
    trees.append(compose("qwen3_toy", parse_all(["peft=lora", "weights=folder"]), device="gpu").config.sections)
    for tree in trees:
        for section in schema.BRIDGE_SECTIONS.keys() - ({"model", "dataset"} - tree.keys()):
            results |= {(section, name) for name in schema.fields(schema.section_class(section, tree))}
    results |= {("dataset", name) for name in schema.fields(schema.bridge_class(schema.SFT_DATASET))}
    return frozenset(results)


def unknown(keys: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `section` and `field` that no model's configuration has."""
    return {(section, name) for section, name in keys - known() if f"{section}.{name}" not in OWN_KEYS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_key_of_bridges_exists(document):
    assert unknown(named("\n".join((*document.spans, *document.code)))) == set()


def test_a_key_that_does_not_exist_is_seen():
    keys = named("`model.num_layer=3 optimizer.clip_grad=1.0` tokenizer.vocab_includes_eod and model.yaml")
    assert unknown(keys) == {("model", "num_layer")}


SCRIPTS = Path(__file__).parents[3] / "scripts"


def runs(command: str) -> list[tuple[str, list[str]]]:
    """Model and overrides of every run that a command makes."""
    kind, model, *rest = command.split()
    if kind != "train" or model.startswith("-"):
        return []
    overrides = [word for word in rest if "=" in word and not word.startswith(("run.dir=", "weights="))]
    pairs = [override.split("=", 1) for override in overrides]
    each = [[f"{key}={value}" for value in _values(text)] for key, text in pairs]
    return [(model, [*item]) for item in product(*each)]


def _values(text: str) -> list[str]:
    return [text] if text.startswith(("'", "[")) else text.split(",")


@pytest.mark.release
def test_every_row_composes_for_the_gpus_that_it_names(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_rows import ROWS

    for name, row in ROWS.items():
        for command in row.commands:
            ranks = [
                compose(model, overrides, device="gpu").config.layout.world for model, overrides in runs(command.words)
            ]
            assert max(ranks, default=command.gpus) == command.gpus, (name, command)
        assert name == "smoke" or name.endswith(f"-{row.gpus}"), name
