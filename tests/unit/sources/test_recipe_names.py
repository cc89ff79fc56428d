"""A mistake in a recipe's file or name is said from the source: neither Bridge nor the recipe is imported."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.versions import KNOWN
from tp_invariant_recipes.sources import recipe_source

SMALL = "raise SystemExit('imported')\ndef small():\n    pass\ndef _own():\n    pass\n"

# What a file holds, the function that is asked for, and what is said.
WRONG = (
    (SMALL, "smal", "has no such function; did you mean 'small'?"),
    (SMALL, "large", "has no such function; there are: small"),
    ("def small(:\n    pass\n", "small", "cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
    ("return 1\n", "small", "cannot be imported: SyntaxError: 'return' outside function"),
    ("a = '\0'\n", "small", "cannot be imported: SyntaxError: source code string cannot contain null bytes"),
)
# Sources that give a module the name `small`, or may.
VALID = ("small = print", "from os import path as small", "from os import *", "def __getattr__(name): pass")


@pytest.fixture(autouse=True)
def _no_bridge(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe_source.needed, "there", lambda module: True)
    monkeypatch.setattr(recipe_source.bridge, "load", lambda: pytest.fail("imported Bridge"))
    monkeypatch.syspath_prepend(tmp_path)


def problems_of(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={recipe}", overrides, device="cpu")
    return caught.value.problems


@pytest.mark.parametrize("source, function, words", WRONG, ids=[words[:30] for *_, words in WRONG])
def test_a_mistake_in_a_file_is_reported_at_once_with_the_others(tmp_path, source, function, words):
    file = tmp_path / "mine.py"
    file.write_text(source)
    problems = problems_of(f"{file}:{function}", "tpp=2")
    assert words in problems[0]
    assert "did you mean 'tp'" in problems[1]


@pytest.mark.parametrize("source", VALID)
def test_every_way_to_give_a_name_is_given_to_the_import(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    recipe_source._possible(f"recipe={tmp_path}/mine.py:small")


def test_a_name_that_the_locked_bridge_lacks_needs_no_import(monkeypatch):
    monkeypatch.setattr(recipe_source, "installed", lambda name: KNOWN[-1].versions[name])
    assert "has no such recipe" in str(problems_of("wholly_different"))
    monkeypatch.setattr(recipe_source, "installed", lambda name: "0.7.0")
    with pytest.raises(pytest.fail.Exception, match="imported Bridge"):
        compose("recipe=wholly_different", device="cpu")
