"""The catalogue against the classes that are installed: an upgrade that adds a field fails here."""

import dataclasses

import pytest

from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.fields.catalogue import SECTIONS, refused, values_of
from tp_invariant_recipes.fields.field import ANY, NONE
from tp_invariant_recipes.fields.model import KNOWN, MULTI_TOKEN_OFF, MULTI_TOKEN_PATTERN, REFUSED
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer

pytestmark = pytest.mark.usefixtures("bridge")

# Defaults of Bridge's that are not allowed: conf/config.yaml sets these fields.
SET_BY_CONF = {"ddp": {"grad_reduce_in_fp32"}, "dataset": {"reset_position_ids", "eod_mask_loss"}}
# Fields without a default.
REQUIRED = {"comm_overlap": {"tp_comm_overlap": False}, "dataset": {"random_seed": 1, "seq_length": 32}}
# What else a container has. `mixed_precision` is one name, and a table has the fields of `model`.
OTHER_SECTIONS = {"model", "mixed_precision", *recipe_layer.OTHER_FIELDS}


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
    assert invariance._unknown(RunConfig(sections | {"model": model})) == []
    without = sorted(model.keys() - KNOWN - REFUSED - {"_target_", *MULTI_TOKEN_OFF, MULTI_TOKEN_PATTERN})
    changed = RunConfig(sections | {"model": model | dict.fromkeys(without, object())})
    assert [problem.key for problem in invariance._unknown(changed)] == [f"model.{name}" for name in without]
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
    listed = KNOWN | REFUSED
    assert listed - installed == set()
