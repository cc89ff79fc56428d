"""`tpi audit` up to the point where Bridge would be imported, and what it makes of a finished training."""

import json
import math

import pytest

from tp_invariant_recipes.compare.norm_ratios import Norms
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.runs.audit_dir import AuditedRun
from tp_invariant_recipes.training.shards import GlobalSlice
from tp_invariant_recipes.training.whole_norms import whole_norms
from tp_invariant_recipes.workflows import audit

pytestmark = pytest.mark.usefixtures("here")

GRAPHS = ("nothing is replayed with cuda_graph=off; cuda_graph=te or cuda_graph=full, or another pair",)

# Arguments of `tpi audit` on a machine without a GPU, and what must stand in the message.
MISTAKES = (
    (["qwen3_toi", "--against", "tp=2"], ["unknown model 'qwen3_toi'; did you mean 'qwen3_toy'?"]),
    (["qwen3_toy"], GRAPHS),
    (["qwen3_toy", "cuda_graph=te"], ["cuda_graph=te: CUDA graphs need a GPU; device=gpu, or cuda_graph=off"]),
    (["qwen3_toy", "--against", "tp=3"], ["tp=3 does not divide"]),
    (["qwen3_toy", "--against", "iters=3"], ["--against iters=3: both train for as long"]),
    (["qwen3_toy", "--against", "run.dir=x"], ["run.dir=x: an audit has its own directory: --dir PATH"]),
    (["qwen3_toy", "iters=3", "--steps", "3", "--against", "tp=2"], ["--steps 3 and iters say the same"]),
    (["qwen3_toy", "--steps", "0", "--against", "tp=2"], ["--steps 0: must be at least 1"]),
    (["qwen3_toy", "--dir", "taken", "--against", "tp=2"], ["--dir taken is there and is not an empty directory"]),
    (
        ["qwen3_toy", "save=2", "gbs=3", "mbs=2", "ledger.trace=1:1"],
        [
            "3 problems",
            "save=2: an audit saves no checkpoints",
            "an audit traces no modules",
            "gbs=3 is not a multiple",
        ],
    ),
)


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("arguments, says", MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_is_one_screen_and_leaves_nothing(cli, here, arguments, says):
    ended = cli("audit", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert "Traceback" not in ended.err
    for part in says:
        assert ended.err.count(part) == 1
    assert sorted(p.name for p in here.rglob("*")) == ["file", "taken"]


def norms(*graphs: int) -> list[Norms]:
    return [Norms(step, count, {"w": 1.0}) for step, count in enumerate(graphs, start=1)]


def test_an_audit_in_which_nothing_was_replayed_proves_nothing():
    audit._check_replayed(norms(0, 0, 0, 0), norms(0, 0, 7, 7), counts_from=3)
    for second in (norms(0, 0, 0, 0), norms(0, 0, 7, 0), norms(0, 0, 0, 7)):
        with pytest.raises(RunError, match="no CUDA graph was replayed at step"):
            audit._check_replayed(norms(0, 0, 0, 0), second, counts_from=3)
    with pytest.raises(RunError, match="the eager training replayed CUDA graphs too"):
        audit._check_replayed(norms(0, 0, 7, 7), norms(0, 0, 7, 7), counts_from=3)


def test_a_training_of_which_steps_are_missing_is_no_answer(tmp_path):
    run = AuditedRun(tmp_path)
    run.norms.parent.mkdir()
    lines = [{"step": step, "graphs": 0, "norms": {"w": 1.0}} for step in (1, 3)]
    run.norms.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match="not one line for each of 3 steps"):
        audit._complete(run, 3)


def part(name: str, row: int, square: float, rows: int = 2) -> tuple:
    return name, (4, 3), GlobalSlice(row, 1, rows, 0, 3), square


def test_the_norm_of_the_whole_counts_replicas_once_and_needs_every_part():
    parts = [part("w", 0, 9.0), part("w", 2, 16.0), part("w", 0, 9.0), part("v", 0, 4.0, rows=4)]
    assert whole_norms(parts) == {"v": 2.0, "w": 5.0}
    assert whole_norms(reversed(parts)) == whole_norms(parts)
    assert math.isnan(whole_norms([part("w", 0, math.nan, rows=4)])["w"])
    for wrong in ([part("w", 0, 9.0)], [part("w", 0, 9.0), part("w", 1, 1.0), part("w", 2, 1.0)]):
        with pytest.raises(RunError, match="cannot tell whose these gradients are: w"):
            whole_norms(wrong)
