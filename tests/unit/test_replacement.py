# SPDX-License-Identifier: Apache-2.0
"""Attributes are replaced for a block and are back afterwards, however the block ends."""

import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.replacement import Replacement, applied, apply


class Base:
    inherited = "base"

    def method(self):
        return "base method"


class Thing(Base):
    value = "value"

    def own(self):
        return "own"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def klass(cls):
        return cls.__name__

    @property
    def computed(self):
        return "computed"


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """A module `victim` with a Thing and a function."""
    made = ModuleType("victim")
    made.Thing = type("Thing", (Base,), dict(vars(Thing)))
    made.function = lambda: "function"
    made.log = []
    monkeypatch.setitem(sys.modules, "victim", made)
    return made


def instead(target: str, value: object = "replaced") -> Replacement:
    return Replacement(f"victim:{target}", lambda original: value, "for the test")


def state(module: ModuleType) -> dict:
    """Everything that a replacement could leave changed, by identity."""
    return dict(vars(module)) | {f"Thing.{k}": v for k, v in vars(module.Thing).items()} | {"base": dict(vars(Base))}


TARGETS = ("function", "Thing", "Thing.value", "Thing.own", "Thing.static", "Thing.klass", "Thing.computed")
INHERITED = ("Thing.inherited", "Thing.method")


@pytest.mark.parametrize("target", TARGETS + INHERITED)
def test_replaced_inside_and_back_outside(module, target):
    before = state(module)
    with applied([instead(target)]):
        holder = module
        for name in target.split("."):
            holder = getattr(holder, name)
        assert holder == "replaced"
    assert state(module) == before


def test_what_is_made_gets_the_original(module):
    wrapped = Replacement("victim:function", lambda original: lambda: f"[{original()}]", "for the test")
    with applied([wrapped, wrapped]):
        assert module.function() == "[[function]]"
    assert module.function() == "function"


@pytest.mark.parametrize(
    "target, error",
    (
        ("victim:no_such_name", AttributeError), ("victim:Thing.no_such_name", AttributeError),
        ("victim:NoSuchThing.own", AttributeError), ("no_such_module_at_all:name", ModuleNotFoundError),
    ),
)  # fmt: skip
def test_an_unknown_target_raises_and_undoes_those_before_it(module, target, error):
    before = state(module)
    with pytest.raises(error), applied([instead("function"), Replacement(target, str, ""), instead("Thing.own")]):
        pytest.fail("the block must not run")
    assert state(module) == before


@given(st.lists(st.sampled_from(TARGETS[2:] + INHERITED)), st.booleans())
def test_any_sequence_is_undone(targets, fail):
    made = ModuleType("victim")
    made.Thing = type("Thing", (Base,), dict(vars(Thing)))
    sys.modules["victim"] = made
    before = state(made)
    try:
        with applied(instead(target, n) for n, target in enumerate(targets)):
            if fail:
                raise ValueError
    except ValueError:
        assert fail
    assert state(made) == before
    del sys.modules["victim"]


def test_for_good_until_undone(module):
    before = state(module)
    undo = apply([instead("function"), instead("Thing.inherited")])
    assert (module.function, module.Thing.inherited) == ("replaced", "replaced")
    undo()
    assert state(module) == before
