"""A mistake in a recipe's file or name is said from the source: neither Bridge nor the recipe is imported."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.known_versions import KNOWN
from tp_invariant_recipes.sources import recipe_names, recipe_source

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
RIGHT = (
    "def small(): pass",
    "async def small(): pass",
    "class small: pass",
    "small = print",
    "a, (small, *b) = 1, (2, 3)",
    "small: object = print",
    "if (small := print): pass",
    "from os import path as small",
    "import small.other",
    "for small in []: pass",
    "with open('x') as small: pass",
    "try:\n    pass\nexcept OSError:\n    small = 1",
    "match 1:\n    case small: pass",
    "match [1]:\n    case [*small]: pass",
    "match {}:\n    case {**small}: pass",
    "def a():\n    global small\n    small = 1",
    "type small = int",
)
UNKNOWN = (
    "from os import *",
    "globals()['sma' + 'll'] = print",
    "vars()['sma' + 'll'] = print",
    "locals().update(a)",
    "exec('small = 1')",
    "def __getattr__(name): pass",
    "import sys\nsetattr(sys.modules[__name__], name, print)",
    "from importlib import import_module as get",
)


@pytest.fixture(autouse=True)
def _no_bridge(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe_source.needed, "there", lambda module: True)
    monkeypatch.setattr(recipe_source.bridge, "load", lambda: pytest.fail("imported Bridge"))
    monkeypatch.syspath_prepend(tmp_path)


def said(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={recipe}", overrides, device="cpu")
    return caught.value.problems


@pytest.mark.parametrize("source, function, words", WRONG, ids=[words[:30] for *_, words in WRONG])
def test_a_mistake_in_a_file_is_said_at_once_with_the_others(tmp_path, source, function, words):
    file = tmp_path / "mine.py"
    file.write_text(source)
    problems = said(f"{file}:{function}", "tpp=2")
    assert words in problems[0]
    assert "did you mean 'tp'" in problems[1]


@pytest.mark.parametrize("source", RIGHT)
def test_every_way_to_give_a_name_counts(tmp_path, source):
    names, _ = recipe_names.functions(source.encode(), tmp_path)
    assert "small" in names


@pytest.mark.parametrize("source", UNKNOWN)
def test_what_the_source_cannot_tell_is_left_to_the_import(tmp_path, source):
    with pytest.raises(recipe_names.Unknown):
        recipe_names.functions(source.encode(), tmp_path)


def test_a_mistake_in_a_module_is_said_at_once(tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "mine.py").write_text(SMALL)
    assert "there is no module my_pakage that Python finds (PYTHONPATH); did you mean 'my_package'?" in str(
        said("my_pakage.mine:small")
    )
    assert "no module my_package.mina that Python finds (PYTHONPATH); did you mean 'my_package.mine'?" in str(
        said("my_package.mina:small")
    )
    assert "my_package.mine has no such function; did you mean 'small'?" in str(said("my_package.mine:smal"))


@pytest.mark.parametrize("init", ("__path__.append('/elsewhere')", "import sys\nsys.modules['x'] = 1"))
def test_a_package_that_finds_its_own_modules_is_imported(tmp_path, init):
    (tmp_path / "odd_package").mkdir()
    (tmp_path / "odd_package" / "__init__.py").write_text(init)
    with pytest.raises(recipe_names.Unknown):
        recipe_names.module_file("odd_package.mine")


def test_a_name_that_the_locked_bridge_lacks_needs_no_import(monkeypatch):
    monkeypatch.setattr(recipe_source, "installed", lambda name: KNOWN[-1].versions[name])
    assert "has no such recipe; tpi models --bridge lists" in str(said("wholly_different"))
    monkeypatch.setattr(recipe_source, "installed", lambda name: "0.7.0")
    with pytest.raises(pytest.fail.Exception, match="imported Bridge"):
        compose("recipe=wholly_different", device="cpu")
