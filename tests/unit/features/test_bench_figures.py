# SPDX-License-Identifier: Apache-2.0
"""`tpi bench` without a training: its turns, what a mode's overrides are, and the figures of finished turns."""

import json
from pathlib import Path

import pytest

from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features import bench
from tp_invariant_recipes.settings import environment

pytestmark = pytest.mark.usefixtures("here", "no_gpus")


def planned(*overrides: str, modes: str = "stock,tree", rounds: int = 2) -> bench.Bench:
    return bench.new("qwen3_toy", overrides, modes.split(","), rounds=rounds, warmup=1, steps=3, directory=Path("b"))


def test_modes_take_turns_and_nothing_is_written(here, monkeypatch):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")  # which stock leaves as it is, and tree asks for
    made = planned("tp=2")
    assert [(number, mode) for number, mode, _ in made.turns] == [(1, "stock"), (1, "tree"), (2, "stock"), (2, "tree")]
    assert [str(run.run_dir.path) for *_, run in made.turns] == ["b/1-stock", "b/1-tree", "b/2-stock", "b/2-tree"]
    for mode, run in made.plans.items():
        assert run.config.numerics.mode == mode
        assert run.config.section("checkpoint")["save_interval"] == 0
        assert run.config.train["train_iters"] == 4
        assert run.config.train["exit_signal_handler"] is False
    assert not Path("b").exists()


def test_a_mode_has_digests_a_guard_and_the_fields_of_its_own(here):
    words = ("numerics.virtual_shards=2", "numerics.initial_weights=invariant", "guard.products=2")
    runs = planned(*words, modes="stock,tree+digests,tree+digests+guard").plans.values()
    assert [run.config.ledger.digests for run in runs] == [0, 1, 1]
    assert [run.config.guard.kind for run in runs] == ["off", "off", "products"]
    assert [run.config.numerics.virtual_shards for run in runs] == [None, 2, 2]
    assert [run.config.numerics.initial_weights for run in runs] == ["invariant"] * 3


def test_figures_are_those_of_the_timed_steps():
    made = planned("tp=2", "gbs=1", "seq=32")
    seconds = {"1-stock": (9, 2, 1, 3), "2-stock": (9, 4, 4, 4), "1-tree": (9, 4, 4, 4), "2-tree": (9, 4, 4, 4)}
    for name, steps in seconds.items():
        run = Path("b", name)
        run.mkdir(parents=True)
        lines = [
            {"step": n, "loss": None, "tokens": 32, "seconds": second, "flops": n * 8e12}
            | {"peak_memory": n << 30, "peak_reserved": (n + (name == "1-tree")) << 30}
            for n, second in enumerate(steps, 1)
        ]
        (run / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = bench.result(made)
    stock, tree = found.modes
    assert (stock.step_ms, stock.rounds) == (bench.Spread(3500, 1000, 4000), (2000, 4000))
    assert (tree.time_ratio, tree.memory_ratio) == (bench.Spread(1.5, 1, 2), 5 / 4)
    assert (stock.time_ratio, stock.memory_ratio) == (None, None)
    assert (tree.tokens_per_second, tree.tflops) == (8, 1)
    assert (tree.allocated_gib, tree.reserved_gib) == (4, 5)
    assert "1.500 (1.000–2.000)" in str(found)
    assert (stock.steps, stock.peak, stock.on) == (6, None, {})
    assert found.as_json()["modes"][1]["time_ratio"] == {"median": 1.5, "min": 1, "max": 2}


@pytest.mark.parametrize(
    "step_ms, counted",
    (
        ((9, 9, 4, 4, 4, 4), (4, 4, 4, 4)),  # a capture, and what it leaves
        ((4, 4, 4, 9, 4, 4), (4, 4, 4, 9, 4, 4)),  # a later outlier counts
        ((9, 8, 7, 6, 5, 4), (6, 5, 4)),  # never steady: half of them
        ((4,), (4,)),
    ),
)
def test_slow_steps_at_the_beginning_are_warm_up(step_ms, counted):
    assert tuple(bench.steady(step_ms)) == counted


def test_each_mode_runs_as_its_users_run_it(monkeypatch):
    monkeypatch.setattr(bench.plan, "detect_device", lambda: "gpu")
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    words = parse_all(["dp=2", "tp=2", "gbs=2", "comm_overlap.tp_comm_overlap=true"])
    runs = bench._composed("qwen3_toy", words, ("stock", "deterministic", "tree"), [])
    on = {mode: bench.switched_on(run.config) for mode, run in runs.items()}
    both = {"overlap_grad_reduce", "overlap_param_gather"}
    fused = {"cross_entropy_loss_fusion", "gradient_accumulation_fusion"}
    assert {*on["stock"]["overlapped"]} == {"tp_comm_overlap", *both}
    assert fused <= {*on["stock"]["fused"]}
    assert on["deterministic"]["overlapped"] == ["tp_comm_overlap"]
    assert {*on["tree"]["overlapped"]} == both
    assert not fused & {*on["deterministic"]["fused"], *on["tree"]["fused"]}
    assert [mode["graphs"] for mode in on.values()] == [["full_iteration"]] * 3
    assert not any("environment" in mode for mode in on.values())
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # stock sets it, too
    slow = {mode: bench.switched_on(run.config).get("environment") for mode, run in runs.items()}
    assert slow == {"stock": ["NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"], "deterministic": None, "tree": None}
