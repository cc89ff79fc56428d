# SPDX-License-Identifier: Apache-2.0
"""`tpi bench`, end to end on two CPU ranks. No test says how long anything takes."""

import json

import pytest

from tp_invariant_recipes.ledger.open import read

SMALL = ("qwen3_toy", "tp=2", "seq=32", "gbs=1", "device=cpu", "model.num_layers=1")


def test_modes_train_in_turn_and_are_compared(shared):
    modes = ("stock", "tree", "tree+digests")
    counts = ("--rounds", "1", "--warmup", "1", "--steps", "1")
    done = shared("bench", *SMALL, *counts, "--modes", ",".join(modes), "--dir", "bench", status=0)
    found = json.loads((shared.folder / "bench/bench.json").read_text())
    assert (found["model"], found["overrides"], found["ranks"]) == ("qwen3_toy", list(SMALL[1:]), 2)
    assert [mode["mode"] for mode in found["modes"]] == list(modes)
    for mode in found["modes"]:
        assert 0 < mode["step_ms"]["min"] == mode["step_ms"]["median"]
        assert mode["tokens_per_second"] == pytest.approx(32 * 1000 / mode["step_ms"]["median"])
        assert mode["tflops"] > 0
        assert mode["reserved_gib"] is None  # a CPU's memory is not counted
    assert "round 1 of 1, tree" in done.stderr
    assert "× time" in done.stdout
    plain, digested = (read(shared.folder / "bench" / f"1-{mode}") for mode in modes[1:])
    assert [step.gradients is not None for step in (*plain.steps, *digested.steps)] == [False, False, True, True]
    assert [(step.loss, step.grad_norm) for step in plain.steps] == [(s.loss, s.grad_norm) for s in digested.steps]
    repeated = shared("bench", *SMALL, "--dir", "bench", status=2)
    assert "--dir bench is there" in repeated.stderr
