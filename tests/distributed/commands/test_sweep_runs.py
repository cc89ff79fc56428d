"""`tpi sweep`, end to end on CPU ranks."""

import json

import pytest


@pytest.mark.release  # in `make test`: unit/features/verify/test_sweep.py
def test_every_run_is_trained_and_they_are_listed(tpi):
    done = tpi("sweep", "qwen3_toy", "seq=64", "iters=2", "seed=1,2", "numerics=tree", "--dir", "s", status=0)
    assert "1 of 2: seed=1 on 1 cpu rank, 2 steps" in done.stderr
    assert "completed: 2 of 2 runs reached their last step; lowest last loss: seed=" in done.stdout
    first, second = (tpi.ledger(f"s/seed{seed}")[-1].loss for seed in (1, 2))
    assert first != second
    result = json.loads((tpi.folder / "s" / "sweep.json").read_text())
    assert [row["loss"]["bits"] for row in result["rows"]] == [first, second]
    assert "2 runs side by side" in (tpi.folder / "s" / "report.html").read_text()
    assert tpi("sweep", "--results", "s").stdout == done.stdout
    assert tpi("compare", "s/seed1", "s/seed2").status == 2
