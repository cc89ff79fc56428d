# SPDX-License-Identifier: Apache-2.0
"""What a recipe of Bridge says is kept until what decides it changes; an own recipe is called each time."""

import json
import os

import pytest

from tests.distributed.recipes.test_recipe_models import MINE
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.sources import recipe_layer, recipe_process
from tp_invariant_recipes.start.cache import cache_dir

pytestmark = pytest.mark.usefixtures("families")

OWN = MINE + "\n\ndef asked():\n    cfg = small()\n    cfg.rng.seed = int(open('number').read())\n    return cfg\n"
BRIDGES = "vanilla_gpt_pretrain_config"  # which leaves its sizes to the user
SIZES = ("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.ffn_hidden_size=128")


@pytest.fixture
def calls(bridge, tmp_path, monkeypatch):
    """Compose a recipe. returns: its seed, and whether it was called."""
    monkeypatch.chdir(tmp_path)
    called = tmp_path / "called"
    real = recipe_layer._read_recipe
    monkeypatch.setattr(recipe_layer, "_read_recipe", lambda *args, **more: called.touch() or real(*args, **more))

    def ask(name, *overrides):
        called.unlink(missing_ok=True)
        sizes = SIZES if name == BRIDGES else ()
        config = compose(f"recipe={name}", ["tp=1", *sizes, *overrides], device="cpu", numerics="stock").config
        return config.section("rng")["seed"], called.exists()

    return ask


def _rewritten(text):
    def change(tmp_path, monkeypatch):
        for file in (cache_dir() / recipe_process.FOLDER).glob("*.json"):
            file.write_text(text(file.read_text()))

    return change


def _touched_source(tmp_path, monkeypatch):
    (tmp_path / "recipe.py").touch()
    monkeypatch.setattr(recipe_process, "_sources", lambda: (tmp_path / "recipe.py",))


# What changes after an answer was kept.
CHANGES = {
    "a variable that is read at import": lambda _, patch: patch.setenv("NEMO_HOME", "/elsewhere"),
    "a GPU": lambda _, patch: patch.setattr(gpus, "visible", lambda: [gpus.Gpu("H100", (9, 0), 1)]),
    "a version": lambda _, patch: patch.setattr(recipe_process, "installed", lambda package: "0.1"),
    "a source of Bridge": _touched_source,
    "a torn file": _rewritten(lambda text: text[:100]),
    "a file of another key": _rewritten(lambda _: json.dumps({"key": "0", "variables": {}, "answer": None})),
}


@pytest.mark.release
def test_a_recipe_of_bridge_is_called_once_until_something_changes(calls, tmp_path, monkeypatch):
    first, called = calls(BRIDGES)
    assert called
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # as in a job, whose environment is another one
    assert calls(BRIDGES, "seed=8") == (8, False)
    for name, change in CHANGES.items():
        with pytest.MonkeyPatch.context() as patch:
            change(tmp_path, patch)
            assert calls(BRIDGES) == (first, True), name
            assert calls(BRIDGES) == (first, False), name


@pytest.mark.parametrize(
    "access",
    (
        "os.environ['RATE'] = '2'", "os.environ.get('RATE')", "os.getenv('RATE')", "'RATE' in os.environ",
        "{**os.environ}",
    ),
)  # fmt: skip
def test_a_variable_that_a_recipe_uses_decides_its_answer(bridge, tmp_path, monkeypatch, access):
    from tp_invariant_recipes.sources import recipe_source

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATE", "0")
    (tmp_path / "mine.py").write_text(f"import os\n{MINE}\n\ndef asked():\n    {access}\n    return small()\n")
    monkeypatch.setattr(recipe_source, "of_bridge", lambda model: True)
    made = []

    def ask(rate):
        monkeypatch.setenv("RATE", rate)
        monkeypatch.setattr(recipe_process, "_forked", lambda *asked: made.append(rate) or forked(*asked))
        recipe_process.ask(model, lambda: recipe_source.call(model, None) and os.environ["RATE"])

    model, forked = f"recipe={tmp_path / 'mine.py'}:asked", recipe_process._forked
    for rate in ("0", "0", "1"):
        ask(rate)
    assert made == ["0", "1"]


def test_configurations_of_hugging_face_are_among_what_it_follows_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "config.json").touch()
    keys = set()
    for size in range(3):
        (snapshot / "config.json").write_text(" " * size)
        keys |= {recipe_process._key("recipe=x", (), None), recipe_process._key("recipe=x", (), str(tmp_path))}
    (tmp_path / "config.json").write_text("{}")
    keys.add(recipe_process._key("recipe=x", (), str(tmp_path)))
    assert len(keys) == 7


def test_an_own_recipe_is_called_by_every_command(calls, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for seed in (7, 8):
        (tmp_path / "number").write_text(str(seed))
        assert calls("mine.py:asked") == (seed, True)
    assert not (cache_dir() / recipe_process.FOLDER).exists()


@pytest.mark.release
def test_the_oldest_answers_go(calls, monkeypatch):
    monkeypatch.setattr(recipe_process, "MOST", 2)
    for home in ("a", "b", "c"):
        monkeypatch.setenv("NEMO_HOME", home)
        calls(BRIDGES)
    assert len([*(cache_dir() / recipe_process.FOLDER).glob("*.json")]) == 2
