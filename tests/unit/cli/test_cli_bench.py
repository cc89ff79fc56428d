"""`tpi bench` up to the point where Bridge would be imported: mistakes cost nothing and leave nothing."""

import pytest

from tp_invariant_recipes.features.bench import workflow as bench

pytestmark = pytest.mark.usefixtures("here", "no_gpus")


def planned_bench(**changes) -> bench.Bench:
    values = dict(rounds=2, warmup=1, steps=3, traced=False, directory=None)
    return bench.new("qwen3_toy", ["tp=2"], ["stock", "tree"], **values | changes)


def test_modes_take_turns():
    turns = [(pass_.mode, pass_.round, pass_.profile, pass_.steps) for pass_ in planned_bench().passes]
    assert turns == [("stock", 1, False, 4), ("tree", 1, False, 4), ("stock", 2, False, 4), ("tree", 2, False, 4)]


def test_traced_passes_come_after_all_rounds():
    passes = planned_bench(rounds=1, traced=True).passes
    assert [(pass_.mode, pass_.profile) for pass_ in passes] == [
        ("stock", False),
        ("tree", False),
        ("stock", True),
        ("tree", True),
    ]


def test_a_mode_records_digests_if_it_says_so():
    plans = bench.new(
        "qwen3_toy", [], ["tree", "tree+digests"], rounds=1, warmup=0, steps=1, traced=False, directory=None
    ).plans
    assert {mode: plan.config.numerics.mode for mode, plan in plans.items()} == {
        "tree": "tree",
        "tree+digests": "tree",
    }
    assert {mode: plan.config.ledger.digests for mode, plan in plans.items()} == {"tree": 0, "tree+digests": 1}


def test_each_mode_has_its_own_configuration_and_nothing_is_written(here):
    before = sorted(here.rglob("*"))
    plans = planned_bench().plans
    assert {mode: plan.config.numerics.mode for mode, plan in plans.items()} == {"stock": "stock", "tree": "tree"}
    for item in plans.values():
        assert item.config.section("checkpoint")["save_interval"] == 0
        assert item.config.train["train_iters"] == 4
        assert item.config.train["exit_signal_handler"] is False
    assert planned_bench().directory.path.parts[0] == "runs"
    assert planned_bench().directory.path.name.startswith("bench-qwen3_toy-tp2-")
    assert sorted(here.rglob("*")) == before
