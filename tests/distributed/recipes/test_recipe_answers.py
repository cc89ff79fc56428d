"""What a recipe says is kept, and asked again once anything that it may follow from has changed."""

import json
import os

import pytest

from tests.distributed.recipes.test_recipe_models import MINE
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.sources import recipe_answers, recipe_layer, recipe_reads
from tp_invariant_recipes.start.cache import cache_dir

pytestmark = pytest.mark.usefixtures("families")

RECIPE = (
    MINE
    + """
import os
from pathlib import Path
from beside import SEED


def asked():
    cfg = small()
    cfg.rng.seed = SEED
    cfg.optimizer.lr = float(os.environ.get("MY_RATE", "0.5"))
    cfg.optimizer.min_lr = 0.25 if (Path(__file__).parent / "flag").exists() else 0.125
    cfg.train.train_iters = 3 + len(list(Path(__file__).parent.glob("*.step")))
    number = Path(__file__).parent / "number"
    cfg.train.global_batch_size = int(number.read_text()) if number.exists() else 2
    return cfg
"""
)


@pytest.fixture
def folder(tmp_path):
    """The recipe lists it, so the cache lies elsewhere."""
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def calls(bridge, folder, monkeypatch):
    """A recipe, its neighbour, and a way to compose it. returns: the seed … that it says, and whether it was called."""
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text(RECIPE)
    (folder / "beside.py").write_text("SEED = 7\n")
    called = folder.parent / "called"

    def ask(*overrides):
        called.unlink(missing_ok=True)
        config = compose("recipe=mine.py:asked", ["tp=1", *overrides], device="cpu").config
        train, optimizer = config.section("train"), config.section("optimizer")
        said = {"seed": config.section("rng")["seed"], "rate": optimizer["lr"], "least": optimizer["min_lr"]}
        return said | {"steps": train["train_iters"], "batch": train["global_batch_size"]}, called.exists()

    monkeypatch.setattr(recipe_layer, "_read_recipe", _noting(recipe_layer._read_recipe, called))
    return ask


def _noting(said, called):
    def noted(*arguments, **keywords):
        found = said(*arguments, **keywords)
        recorded, recipe_reads._recording[:] = [*recipe_reads._recording], []
        called.touch()
        recipe_reads._recording[:] = recorded
        return found

    return noted


BEFORE = {"seed": 7, "rate": 0.5, "least": 0.125, "steps": 3, "batch": 2}


def test_a_recipe_is_asked_once(calls):
    assert calls() == (BEFORE, True)
    assert calls() == (BEFORE, False)
    assert calls("seed=8") == (BEFORE | {"seed": 8}, False)


# What changes, and what the recipe says then.
CHANGES = {
    "the file": (lambda here, _: (here / "mine.py").write_text(RECIPE.replace("3 +", "1 + 3 +")), {"steps": 4}),
    "a module beside it": (lambda here, _: (here / "beside.py").write_text("SEED = 19\n"), {"seed": 19}),
    "a variable": (lambda _, patch: patch.setenv("MY_RATE", "0.75"), {"rate": 0.75}),
    "a file that was not there": (lambda here, _: (here / "flag").touch(), {"least": 0.25}),
    "a file in a folder that it lists": (lambda here, _: (here / "one.step").touch(), {"steps": 4}),
    "a file that it reads": (lambda here, _: (here / "number").write_text("4"), {"batch": 4}),
    "a GPU": (lambda _, patch: patch.setattr(gpus, "visible", lambda: [gpus.Gpu("H100", (9, 0), 1)]), {}),
    "a package": (lambda here, patch: patch.syspath_prepend(_with_package(here)), {}),
}


def _with_package(here):
    (here / "packages").mkdir()
    (here / "packages" / "new.py").touch()
    return here / "packages"


SOME = ("the file", "a module beside it", "a variable")
MORE = [pytest.param((change,), marks=pytest.mark.release) for change in CHANGES if change not in SOME]


@pytest.mark.parametrize("changes", (SOME, *MORE), ids=", ".join)
def test_after_each_change_it_is_asked_again(calls, folder, monkeypatch, changes):
    assert calls() == (BEFORE, True)
    expected = BEFORE
    for change in changes:
        make, said = CHANGES[change]
        make(folder, monkeypatch)
        expected = expected | said
        assert calls() == (expected, True), change
    assert calls() == (expected, False)


@pytest.mark.release
def test_the_same_size_and_time_do_not_hide_a_change(calls, folder):
    calls()
    state = (folder / "beside.py").stat()
    (folder / "beside.py").write_text("SEED = 9\n")
    os.utime(folder / "beside.py", ns=(state.st_atime_ns, state.st_mtime_ns))
    (folder / "__pycache__" / "beside.cpython-312.pyc").unlink(missing_ok=True)
    assert calls() == (BEFORE | {"seed": 9}, True)


def files():
    return sorted((cache_dir() / recipe_answers.FOLDER).glob("*.json"))


@pytest.mark.release
def test_another_version_of_a_module_is_asked_again(calls, monkeypatch):
    calls()
    (kept,) = files()
    content = json.loads(kept.read_text())
    (bridge,) = [name for name in content["files"] if name.endswith("megatron/bridge/recipes/common.py")]
    content["files"][bridge] = "1 1 1 1"
    kept.write_text(json.dumps(content))
    assert calls() == (BEFORE, True)


DAMAGE = {
    "torn": lambda text: text[:100],
    "no object": lambda text: "[]",
    "without files": lambda text: json.dumps({**json.loads(text), "files": None}),
    "of another key": lambda text: json.dumps({**json.loads(text), "key": "0"}),
    "no text": lambda text: "\udcff",
}


@pytest.mark.release
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_no_error(calls, damage):
    calls()
    (kept,) = files()
    kept.write_bytes(DAMAGE[damage](kept.read_text()).encode(errors="surrogateescape"))
    assert calls() == (BEFORE, True)


UNSEEN = {
    "a clock": "import time\n",
    "a neighbour with a clock": "import clock\n",
    "a changing file": "Path('/proc/self/stat').read_text()\n",
    "a written file": "Path('written').write_text('1')\n",
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.release) for what in UNSEEN])
def test_what_may_follow_from_more_is_not_kept(calls, folder, what):
    (folder / "clock.py").write_text("import time\n")
    (folder / "mine.py").write_text(f"from pathlib import Path\n{UNSEEN[what]}{RECIPE}")
    assert calls() == (BEFORE, True)
    assert calls() == (BEFORE, True)
    assert files() == []


@pytest.mark.release
def test_a_change_during_the_life_of_the_process_is_not_trusted(calls, monkeypatch):
    monkeypatch.setattr(recipe_reads, "_BEGAN", 0.0)
    calls()
    assert calls() == (BEFORE, True)


@pytest.mark.release
def test_errors_are_not_kept(calls, folder):
    (folder / "mine.py").write_text("def asked():\n    raise ValueError('no')\n")
    for _ in range(2):
        with pytest.raises(Exception, match="ValueError: no"):
            calls()
    assert files() == []


@pytest.mark.release
def test_the_oldest_answers_go(calls, monkeypatch):
    monkeypatch.setattr(recipe_answers, "MOST", 2)
    for rate in ("0.5", "0.6", "0.7"):
        monkeypatch.setenv("MY_RATE", rate)
        calls()
    assert len(files()) == 2
