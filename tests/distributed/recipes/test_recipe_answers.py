"""What a recipe of Bridge says is kept until its sources change; an own recipe is called each time."""

import json

import pytest

from tests.distributed.recipes.test_recipe_models import MINE
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.sources import recipe_answers, recipe_layer
from tp_invariant_recipes.start.cache import cache_dir

pytestmark = pytest.mark.usefixtures("families")

OWN = MINE + "\n\ndef asked():\n    cfg = small()\n    cfg.rng.seed = int(open('number').read())\n    return cfg\n"


@pytest.fixture
def calls(bridge, tmp_path, monkeypatch):
    """Compose a recipe. returns: its seed, and whether it was called."""
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "called"
    real = recipe_layer._read_recipe
    monkeypatch.setattr(recipe_layer, "_read_recipe", lambda *args, **more: called.touch() or real(*args, **more))

    def ask(name, *overrides):
        called.unlink(missing_ok=True)
        config = compose(
            f"recipe={name}", ["tp=1", *(SIZES if name == BRIDGES else ()), *overrides], device="cpu", numerics="stock"
        ).config
        return config.section("rng")["seed"], called.exists()

    return ask


BRIDGES = "vanilla_gpt_pretrain_config"  # which leaves its sizes to the user
SIZES = ("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=128")


def files():
    return sorted((cache_dir() / recipe_answers.FOLDER).glob("*.json"))


def _touched_source(tmp_path, monkeypatch):
    source = tmp_path / "recipe.py"
    source.touch()
    monkeypatch.setattr(recipe_answers, "_sources", lambda: (source,))


def _torn(tmp_path, monkeypatch):
    for file in files():
        file.write_text(file.read_text()[:100])


def _of_another_key(tmp_path, monkeypatch):
    for file in files():
        file.write_text(json.dumps({"key": "0", "answer": None}))


# What changes after an answer was kept.
CHANGES = {
    "a variable": lambda _, patch: patch.setenv("MY_RATE", "0.75"),
    "a GPU": lambda _, patch: patch.setattr(gpus, "visible", lambda: [gpus.Gpu("H100", (9, 0), 1)]),
    "a version": lambda _, patch: patch.setattr(recipe_answers, "installed", lambda package: "0.1"),
    "a source of Bridge": _touched_source,
    "a torn file": _torn,
    "a file of another key": _of_another_key,
}


@pytest.mark.release
def test_a_recipe_of_bridge_is_called_once_until_something_changes(calls, tmp_path):
    first, called = calls(BRIDGES)
    assert called
    assert calls(BRIDGES, "seed=8") == (8, False)
    for name, change in CHANGES.items():
        with pytest.MonkeyPatch.context() as patch:
            change(tmp_path, patch)
            assert calls(BRIDGES) == (first, True), name
            assert calls(BRIDGES) == (first, False), name


def test_configurations_of_hugging_face_are_among_what_it_follows_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "config.json").touch()
    keys = set()
    for size in range(3):
        (snapshot / "config.json").write_text(" " * size)
        keys |= {recipe_answers._key(("x",), None), recipe_answers._key(("x",), str(tmp_path))}
    (tmp_path / "config.json").write_text("{}")
    keys.add(recipe_answers._key(("x",), str(tmp_path)))
    assert len(keys) == 7


def test_an_own_recipe_is_called_by_every_command(calls, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for seed in (7, 8):
        (tmp_path / "number").write_text(str(seed))
        assert calls("mine.py:asked") == (seed, True)
    assert files() == []


def test_errors_are_not_kept(calls, tmp_path):
    (tmp_path / "mine.py").write_text("def asked():\n    raise ValueError('no')\n")
    for _ in range(2):
        with pytest.raises(Exception, match="ValueError: no"):
            calls("mine.py:asked")
    assert files() == []


@pytest.mark.release
def test_the_oldest_answers_go(calls, monkeypatch):
    monkeypatch.setattr(recipe_answers, "MOST", 2)
    for rate in ("0.5", "0.6", "0.7"):
        monkeypatch.setenv("MY_RATE", rate)
        calls(BRIDGES)
    assert len(files()) == 2
