"""One ledger for every dp, micro-batch size and placement of experts at a fixed number of data shards, end to end.

The rows of LAYOUTS are chosen so that each pair of values (tp, dp, mbs, distributed optimizer, overlap, ep) that fits
on few ranks occurs in some row of some model. In `make test`: test_invariance.py, with the control.
"""

import shutil

import pytest

from tests.distributed.scenario import STOCK, agree, unequal
from tests.distributed.small_models import BUCKETS, DENSE, DISTRIBUTED, GATHER, small
from tp_invariant_recipes.ledger.open import read

pytestmark = [pytest.mark.release, pytest.mark.timeout(2400)]

MODELS = {"dense": DENSE, "experts": small("qwen3_moe_toy"), "hybrid": small("nemotron3_nano_toy")}

VALIDATED = "validation.eval_iters=1 validation.eval_interval=1"
LAYOUTS = {
    "dense": (
        "", "mbs=2", "dp=2", "dp=4", f"dp=4 {GATHER}", "dp=4 pp=2", f"tp=2 sp=false dp=2 mbs=2 {BUCKETS}",
        f"dp=2 pp=2 mbs=2 {GATHER}", f"tp=4 dp=2 {BUCKETS}", f"tp=2 dp=4 {GATHER}",
        f"tp=2 sp=false dp=4 {DISTRIBUTED}",
    ),
    "experts": (
        "", f"tp=2 dp=2 ep=4 mbs=2 {BUCKETS}", "dp=2 ep=2", f"dp=4 ep=4 {GATHER}", "tp=2 ep=2 dp=4",
        f"tp=2 dp=4 ep=8 {GATHER}", f"dp=4 ep=2 {BUCKETS}", f"tp=4 dp=2 ep=2 {DISTRIBUTED}",
        f"dp=2 ep=2 pp=2 {GATHER}",
    ),
    "hybrid": (
        "", "dp=2 ep=2", "dp=4 ep=2", f"dp=4 {GATHER}", f"tp=2 dp=2 {GATHER}", f"tp=2 dp=4 ep=4 {BUCKETS}",
        f"tp=2 dp=2 ep=4 {DISTRIBUTED}",
    ),
}  # fmt: skip
MANY = ("iters=2 gbs=16 numerics.data_shards=16", ("mbs=8", "dp=8", f"dp=16 {GATHER}", "dp=2 mbs=4"))


@pytest.mark.parametrize("model", LAYOUTS)
def test_one_ledger_for_more_layouts(scenario, model):
    stages = "model.num_layers=2" if model == "dense" else ""
    agree(scenario(MODELS[model], f"iters=3 gbs=8 numerics.data_shards=4 {VALIDATED}", stages), LAYOUTS[model])


def test_one_ledger_for_sixteen_ranks(scenario):
    fixed, layouts = MANY
    agree(scenario(DENSE, fixed), layouts)


def test_stock_validates_on_other_sequences(scenario):
    """The control: two sequences of a step are added in one order, so training agrees, but validation does not."""
    stock = scenario(DENSE, STOCK, "iters=1 gbs=2", VALIDATED)
    assert unequal(stock("dp=1").ledger(), stock("dp=2").ledger()) == ["step 1: evaluations"]
    compared = stock("dp=1").compared(stock("dp=2"), status=1)
    assert "different at step 1: validation loss (validation/0:2) f32:" in compared.stdout


def test_a_resumed_run_validates_where_it_was(scenario, tpi):
    """In another layout, and longer than planned: the loss after its first end is not of the longer run."""
    fixed = scenario(DENSE, "gbs=4 numerics.data_shards=2 save=2 scheduler.lr_decay_iters=6", VALIDATED)
    whole, begun = fixed("iters=6"), fixed("iters=4")
    assert list(begun.ledger()[-1].evaluations) == ["validation/12:16", "final_validation/16:20", "test/0:4"]
    shutil.copytree(begun.run, tpi.folder / "begun")
    tpi("train", "--resume", "begun", "iters=6", "dp=2", status=0)
    assert unequal(read(tpi.folder / "begun").steps, whole.ledger()) == []


def _fail_after_the_test() -> None:
    """With the final validation in the ledger, and not the test."""
    from tp_invariant_recipes.observe.recorder import Recorder

    def failing(self, context):
        raise ValueError("planted")

    Recorder.on_test_end = failing


def test_a_run_that_failed_after_its_last_step_reevaluates(scenario, tpi):
    words = (*DENSE.split(), "iters=2", "gbs=2", "save=2", *VALIDATED.split())
    tpi("train", *words, "run.dir=failed", before=_fail_after_the_test, status=2)
    assert list(read(tpi.folder / "failed").steps[-1].evaluations) == ["validation/2:4", "final_validation/4:6"]
    tpi("train", "--resume", "failed", status=0)
    assert unequal(read(tpi.folder / "failed").steps, scenario(*words).ledger()) == []


@pytest.mark.parametrize("axis, shards, gbs", (("dp", "data_shards", 4), ("cp", "context_shards", 2)))
def test_verify_takes_the_largest_degree(scenario, tpi, axis, shards, gbs):
    """And without it, two runs with a rank for each shard are not comparable, which names the key."""
    words = f"qwen3_toy seq=64 model.num_layers=1 iters=1 gbs={gbs}"
    tpi("verify", *words.split(), f"{axis}=1,2", "--dir", "cells", status=0)
    cells = [tpi.folder / "cells" / f"{axis}{degree}" for degree in (1, 2)]
    assert [read(cell).header.numerics[shards] for cell in cells] == [2, 2]
    single = scenario(words, f"{axis}=1")
    single.ledger()
    compared = tpi("compare", single.run, cells[0], status=2)
    assert f"numerics.{shards} is 1 and 2; train both with numerics.{shards}=2" in compared.stdout
