# SPDX-License-Identifier: Apache-2.0
"""`recipe=…`: its three forms, and what is said of each that names nothing. Megatron-Bridge is not imported."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.versions import pinned
from tp_invariant_recipes.runs.run_dir import choose
from tp_invariant_recipes.sources import recipe_layer, recipe_source


@pytest.fixture
def recipe_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "mine.py"
    made.write_text("def small():\n    return None\n")
    return made


def test_a_name_is_one_of_bridges():
    result = recipe_source.parse("recipe=qwen3_8b_pretrain_config")
    assert (result.module, result.file, result.function) == (recipe_source.BRIDGE, None, "qwen3_8b_pretrain_config")


def test_a_module_and_a_file(recipe_file):
    assert recipe_source.parse("recipe=my.own:small").module == "my.own"
    result = recipe_source.parse("recipe=mine.py:small")
    assert (result.file, result.function) == (recipe_file, "small")


def test_the_path_of_a_file_becomes_whole(recipe_file):
    assert recipe_source.absolute("recipe=mine.py:small") == f"recipe={recipe_file}:small"
    assert recipe_source.absolute("recipe=qwen3_8b_pretrain_config") == "recipe=qwen3_8b_pretrain_config"
    assert recipe_source.absolute("recipe=none.py:small") == "recipe=none.py:small"
    assert recipe_source.absolute("qwen3_toy") == "qwen3_toy"


# What names nothing, and the words that say so.
WRONG = (
    ("recipe=qwen3_8b_pretrian_config", "did you mean 'qwen3_8b_pretrain_config'?"),
    ("recipe=none.py:small", "there is no such file"),
    ("recipe=mine.py", "which function of this file? recipe=mine.py:FUNCTION"),
    ("recipe=mine.py:", "'' is no name of a function"),
    ("recipe=a-b:small", "'a-b' is neither a module nor a file that ends in .py"),
    ("recipe=", "names no function"),
    ("recipe=two words", "names no function"),
)


@pytest.fixture
def no_megatron(monkeypatch) -> None:
    """Every import of Megatron fails, whatever earlier tests of this process have imported."""
    for name in ["megatron", *(name for name in sys.modules if name.startswith("megatron."))]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("recipe, words", WRONG, ids=[recipe for recipe, _ in WRONG])
def test_what_names_nothing_is_reported_without_bridge(recipe_file, no_bridge, no_megatron, recipe, words):
    with pytest.raises(ConfigError, match="recipe=") as caught:
        compose(recipe)
    assert words in str(caught.value)


def test_other_problems_are_reported_in_the_same_message(recipe_file):
    with pytest.raises(ConfigError) as caught:
        compose("recipe=none.py:small", ["tpp=2", "recipe.name=x"])
    assert len(caught.value.problems) == 3
    assert any("tpi fills recipe.name in" in problem for problem in caught.value.problems)


def test_a_folder_without_a_configuration(tmp_path, recipe_file):
    with pytest.raises(ConfigError, match="there is no such folder"):
        compose("recipe=mine.py:small", [f"recipe.hf_folder={tmp_path / 'none'}"])
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        compose("recipe=mine.py:small", [f"recipe.hf_folder={tmp_path}"])


def test_a_recipe_is_no_override():
    with pytest.raises(ConfigError, match="recipe=NAME replaces the name of a model"):
        compose("qwen3_toy", ["recipe=qwen3_8b_pretrain_config"])
    with pytest.raises(ConfigError, match="qwen3_toy is no recipe"):
        compose("qwen3_toy", ["recipe.hf_folder=/tmp"])
    with pytest.raises(ConfigError, match="a recipe with data of its own decides it"):
        compose("qwen3_toy", ["data.kind=recipe"])


def test_a_run_is_named_after_the_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose(None, "verify-recipe=/a/mine.py:small-tp2").path.name.startswith("verify-small-tp2-")
    assert choose(None, "recipe=qwen3_8b_pretrain_config").path.name.startswith("qwen3_8b_pretrain_config-")


@dataclass
class _Graphs:
    cuda_graph_impl: str = "local"
    cuda_graph_scope: str | list | None = None
    external_cuda_graph: bool = False


@pytest.mark.parametrize(
    "message, kind",
    (
        ({"cuda_graph_scope": "full_iteration"}, "full_iteration"),
        ({"external_cuda_graph": True}, "transformer_engine"),
        ({"cuda_graph_scope": ["attn"]}, "local"),
        ({}, "local"),
    ),
)
def test_earlier_names_of_graphs(message, kind):
    result = recipe_layer._values("model", _Graphs(**message))
    assert result["cuda_graph_impl"] == kind
    assert result.get("cuda_graph_scope") == (["attn"] if "attn" in str(message) else None)


SMALL = "raise SystemExit('imported')\ndef small():\n    pass\ndef _own():\n    pass\n"

# What a file holds, the function that is asked for, and what is said.
WRONG_FILES = (
    (SMALL, "smal", "has no such function; did you mean 'small'?"),
    (SMALL, "large", "has no such function; there are: small"),
    ("def small(:\n    pass\n", "small", "cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
    ("return 1\n", "small", "cannot be imported: SyntaxError: 'return' outside function"),
    ("a = '\0'\n", "small", "cannot be imported: SyntaxError: source code string cannot contain null bytes"),
)
# Sources that give a module the name `small`, or may.
VALID = ("small = print", "from os import path as small", "from os import *", "def __getattr__(name): pass")


@pytest.fixture
def no_bridge(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe_source.needed, "there", lambda module: True)
    monkeypatch.setattr(recipe_source.bridge, "load", lambda: pytest.fail("imported Bridge"))
    monkeypatch.syspath_prepend(tmp_path)


def recipe_problems(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        compose(f"recipe={recipe}", overrides, device="cpu")
    return caught.value.problems


@pytest.mark.parametrize("source, function, words", WRONG_FILES, ids=[words[:30] for *_, words in WRONG_FILES])
def test_a_mistake_in_a_file_is_reported_at_once_with_the_others(tmp_path, no_bridge, source, function, words):
    file = tmp_path / "mine.py"
    file.write_text(source)
    problems = recipe_problems(f"{file}:{function}", "tpp=2")
    assert words in problems[0]
    assert "did you mean 'tp'" in problems[1]


@pytest.mark.parametrize("source", VALID)
def test_every_way_to_give_a_name_is_given_to_the_import(tmp_path, no_bridge, source):
    (tmp_path / "mine.py").write_text(source)
    recipe_source._possible(f"recipe={tmp_path}/mine.py:small")


def test_a_name_that_the_locked_bridge_lacks_needs_no_import(monkeypatch, no_bridge):
    monkeypatch.setattr(recipe_source, "installed", lambda name: pinned()[name])
    assert "has no such recipe" in str(recipe_problems("wholly_different"))
    monkeypatch.setattr(recipe_source, "installed", lambda name: "0.7.0")
    with pytest.raises(pytest.fail.Exception, match="imported Bridge"):
        compose("recipe=wholly_different", device="cpu")
