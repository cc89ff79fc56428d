"""A benchmark whose ranks left early has no result."""

import json
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.bench import workflow
from tp_invariant_recipes.features.bench.workflow import _check_complete
from tp_invariant_recipes.runs.bench_dir import BenchDir, Pass

PASSES = (Pass("stock", 1, 1, 3), Pass("tree", 1, 1, 2))
LINE = {
    "mode": "tree", "round": 1, "profile": False, "step": 1, "counts": True, "seconds": 0.5, "tokens": 64,
    "memory": "allocated", "peak_bytes": 0,
}  # fmt: skip


@pytest.fixture
def bench(tmp_path):
    """Two ranks with a line for every step of both passes."""
    directory = BenchDir(tmp_path)
    directory.figures(0).parent.mkdir()
    for rank in range(2):
        lines = [json.dumps(LINE | {"pass": number}) for number, pass_ in enumerate(PASSES) for _ in range(pass_.steps)]
        directory.figures(rank).write_text("\n".join(lines) + "\n")
    return SimpleNamespace(directory=directory, passes=PASSES, first=SimpleNamespace(layout=SimpleNamespace(world=2)))


def test_a_benchmark_with_all_its_steps_is_complete(bench):
    _check_complete(bench)


@pytest.mark.parametrize(
    "kept, words",
    ((4, "step 1 of 2 of tree, pass 2 of 2"), (2, "step 2 of 3 of stock, pass 1 of 2"), (0, "step 0 of 3 of stock")),
)
def test_one_that_lacks_steps_of_a_rank_is_not(bench, kept, words):
    file = bench.directory.figures(1)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:kept]))
    with pytest.raises(RunError, match=words):
        _check_complete(bench)
    file.unlink()
    with pytest.raises(RunError, match="step 0 of 3 of stock"):
        _check_complete(bench)


def test_stock_goes_without_what_has_a_meaning_for_invariant_modes_alone(monkeypatch):
    monkeypatch.setattr(workflow.plan, "detect_device", lambda: "gpu")
    composed = workflow._composed("qwen3_toy", ["tp=2", "device.peer_memory=always"], ["stock", "tree"], [])
    assert [run.config.device.peer_memory for run in composed.values()] == ["auto", "always"]
