"""The lists of allowed values against the classes that are installed: an upgrade that adds a field fails here."""

import dataclasses

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import experts, invariance, latent, model_fields
from tp_invariant_recipes.coverage.allowed_fields import SECTIONS, refused
from tp_invariant_recipes.settings import schema

pytestmark = pytest.mark.usefixtures("bridge")

# Defaults of Bridge's that are not allowed: conf/config.yaml sets these fields.
SET_BY_CONF = {"optimizer": set(), "ddp": {"grad_reduce_in_fp32"}, "dist": set()}


def defaults(section: str) -> dict:
    cls = schema.section_class(section, {})
    return {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_has_a_row_for_every_field_of_the_installed_class_and_no_other(section):
    assert SECTIONS[section].keys() == defaults(section).keys()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_field_that_nobody_sets_is_allowed(section):
    wrong = {line.partition("=")[0].partition(".")[2] for line in refused(section, defaults(section))}
    assert wrong == SET_BY_CONF[section]
    assert wrong <= compose("qwen3_toy").config.sections[section].keys()


def test_the_fields_of_a_model_that_are_known_are_fields_of_the_installed_providers():
    trees = [{"model": {"_target_": name}} for name in schema.PROVIDERS]
    installed = {name for tree in trees for name in schema.fields(schema.section_class("model", tree))}
    listed = {*model_fields.KNOWN, *invariance.OFF, *experts.OFF, *latent.OFF}
    assert listed - installed == set()
