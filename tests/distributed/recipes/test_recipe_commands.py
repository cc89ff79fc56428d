# SPDX-License-Identifier: Apache-2.0
"""`recipe=FILE.py:FUNCTION` with every command that takes a model, and with those that continue its runs."""

import json

import pytest

from tests.distributed.recipes.test_recipe_models import MINE
from tp_invariant_recipes.ledger.open import read

pytestmark = pytest.mark.usefixtures("families")

STOCK = ("numerics=stock", "numerics.initial_weights=invariant", "ledger.digests=1")


# Each process that imports the recipe is noted in the file `processes`.
NOTED = """

with open({!r}, "a") as file:
    import os

    print(os.getpid(), file=file)
"""


@pytest.fixture(scope="module")
def recipe(bridge, shared):
    """The recipe as commands record it; they are given the file's name alone."""
    (shared.folder / "mine.py").write_text(MINE + NOTED.format(str(shared.folder / "processes")))
    return f"recipe={shared.folder / 'mine.py'}:small"


@pytest.fixture(autouse=True)
def _imported_by_no_launcher(recipe, shared, monkeypatch):
    """The process of a command forks the ranks of its runs, so none of them may import a recipe."""
    started = []
    start = shared.start
    monkeypatch.setattr(shared, "start", lambda *a, **k: started.append(start(*a, **k)) or started[-1])
    yield
    noted = {int(line) for line in (shared.folder / "processes").read_text().split()}
    assert not {process.pid for process in started} & noted


@pytest.fixture(scope="module")
def verified(recipe, shared):
    """Two runs of stock numerics, which differ."""
    shared("verify", "recipe=mine.py:small", "tp=1,2", *STOCK, "save=1", "--dir", "stock", status=1)
    return shared.folder / "stock"


@pytest.mark.release
def test_a_run_goes_on_with_more_steps(recipe, verified, shared):
    shared("train", "--resume", "stock/tp1", "iters=3", "scheduler.lr_decay_iters=2", status=0)
    assert len(shared.ledger("stock/tp1")) == 3


@pytest.mark.release
def test_certify(recipe, verified, shared):
    assert shared("certify", "stock/tp2", "--out", "tp2.tpicert").status == 0
    shared("certify", "--check", "tp2.tpicert", status=0)


@pytest.mark.release
def test_bisect(recipe, verified, shared):
    done = shared("bisect", "stock/tp1", "stock/tp2", "--dir", "bisect", status=1)
    assert "the operation: the forward pass of decoder.layers.0.self_attention.linear_proj" in done.stdout


@pytest.mark.release
def test_what_failed_is_retrained(recipe, verified, shared):
    repeated = shared("verify", "--last-failed", "--dir", "stock", status=1)
    assert "different: tp=2" in repeated.stdout


@pytest.mark.release
def test_bench(recipe, shared):
    done = shared("bench", "recipe=mine.py:small", "--rounds", "1", "--warmup", "1", "--steps", "1", "--dir", "bench")
    assert done.status == 0, done.stderr
    result = json.loads((shared.folder / "bench" / "bench.json").read_text())
    assert result["model"] == recipe
    assert [mode["mode"] for mode in result["modes"]] == ["stock", "deterministic", "tree"]


@pytest.mark.release
def test_audit(recipe, shared):
    weights = "numerics.initial_weights=invariant"
    shared("audit", "recipe=mine.py:small", weights, "--against", "tp=2", "--dir", "audit", status=0)
    shared("audit", "recipe=mine.py:small", "--resume-at", "2", "--dir", "resume", status=0)


@pytest.mark.release
def test_text_stands_for_the_data_of_a_recipe(recipe, shared, text):
    shared("train", "recipe=mine.py:small", "data=text", f"data.path={text}", "run.dir=text", status=0)
    assert read(shared.folder / "text").header.identity["data.digest"]


def test_a_job_has_the_file_by_its_whole_path(recipe, shared):
    nodes = ("cluster.name=site", "cluster.gpus_per_node=0", "cluster.ranks_per_node=4", "slurm.time=5")
    image = ("cluster.container=images.example#site", "cluster.python=python3")
    done = shared("submit", "recipe=mine.py:small", *nodes, *image, "tp=2", "run.dir=job", "--dry-run", status=0)
    assert f"train {recipe} \\\n" in done.stdout
    assert f",{shared.folder}:{shared.folder}" in done.stdout
