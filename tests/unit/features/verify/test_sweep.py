"""`tpi sweep` without a training: which runs a command line means, what is refused, how finished runs are listed."""

import json
import re
from pathlib import Path

import pytest

from tests import ledgers
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.features.verify import sweep
from tp_invariant_recipes.features.verify import workflow as verify
from tp_invariant_recipes.features.verify.verdict import judge
from tp_invariant_recipes.launch import record
from tp_invariant_recipes.runs.matrix_dir import MatrixDir

pytestmark = pytest.mark.usefixtures("here", "no_gpus")

LOSSES = ("f32:40c80000", "f32:40b80000", "f32:40c00000", "f32:7fc00000")  # 6.25, 5.75, 6, NaN


def planned_sweep(*overrides: str) -> verify.Verification:
    return sweep.new("qwen3_toy", overrides, directory=Path("s"))


def finished(*losses: str, steps: int = 2) -> MatrixDir:
    """A sweep over as many learning rates whose runs have these last losses; the last of four steps is planned."""
    result = planned_sweep(f"lr={','.join(f'{n}e-2' for n in range(1, len(losses) + 1))}", "iters=2")
    result.directory.path.mkdir()
    result.directory.write_matrix(result.matrix)
    for cell, loss in zip(result.matrix.cells, losses, strict=True):
        run = result.plans[cell.name]
        head = verify.Header(identity=run.identity, layout=cell.layout, numerics=cell.numerics)
        record.write(run, attempt=False)
        records = (ledgers.record(step, loss=loss) for step in range(1, steps + 1))
        ledgers.write(result.directory.cell(cell.name).ledger, head, records)
    return result.directory


def test_every_combination_is_a_run_whatever_its_identity_and_length(here):
    result = planned_sweep("lr=1e-3,3e-4", "seed=1,2", "iters=3")
    assert [cell.label for cell in result.matrix.cells] == [
        "lr=0.001 seed=1",
        "lr=0.001 seed=2",
        "lr=0.0003 seed=1",
        "lr=0.0003 seed=2",
    ]
    assert len({cell.identity_hash for cell in result.matrix.cells}) == 4
    assert [cell.steps for cell in planned_sweep("iters=3,4").matrix.cells] == [3, 4]


def test_finished_runs_are_listed_and_shown_on_one_page(cli):
    where = finished(*LOSSES)
    listed = cli("sweep", "--results", where.path)
    assert (listed.status, listed.err) == (0, "")
    assert re.findall(r"lr=\S+ +1 +2 +\S+ +1.25 +(\w+)", listed.out) == ["completed"] * 4
    assert f"curves in {where.page}" in listed.out
    swept = json.loads(cli("sweep", "--results", where.path, "--json").out)
    assert (swept["verdict"], swept["exit_status"], swept["page"]) == ("completed", 0, str(where.page))
    assert swept["text"] == "completed: 4 of 4 runs reached their last step; lowest last loss: lr=0.02, 5.75"
    assert json.loads(where.sweep.read_text()) == swept
    assert [row["loss"]["value"] for row in swept["rows"]] == [6.25, 5.75, 6.0, "nan"]
    page = where.page.read_text()
    assert "4 runs side by side" in page
    assert "their bits are not compared" in page
    assert "not comparable" not in page
    assert page.count("optimizer.lr") == 1


def test_a_run_that_is_not_finished_or_has_the_ledger_of_another_is_named_and_counts():
    where = finished(*LOSSES[:3])
    where.cell("lr-0.02").ledger.replace(where.cell("lr-0.03").ledger)
    swept = sweep.results(where.path)
    assert (swept.verdict, swept.exit_status) == ("incomplete", 2)
    assert swept.line == "incomplete: 1 of 3 runs reached their last step"
    states = [("lr=0.01", "completed"), ("lr=0.02", "not run"), ("lr=0.03", "failed")]
    assert [(row.label, row.state) for row in swept.rows] == states
    assert where.read_result().exit_status == 2


def test_without_a_step_there_is_no_page():
    swept = sweep.results(finished(*LOSSES[:2], steps=0).path)
    assert swept.page is None
    assert "No page: no run has a step." in swept.remarks


def test_a_verify_is_no_sweep_and_a_sweep_no_verify(here):
    with pytest.raises(RunError, match=r"s is not a directory of tpi verify: matrix\.json: tpi sweep has made it"):
        judge(finished(*LOSSES[:2]).path)
    result = verify.new("qwen3_toy", ["tp=1,2"], against=None, directory=Path("v"))
    result.directory.path.mkdir()
    result.directory.write_matrix(result.matrix)
    with pytest.raises(RunError, match=r"v is not a directory of tpi sweep: matrix\.json: tpi verify has made it"):
        sweep.results(Path("v"))


# Words after `tpi train qwen3_toy`, and where the message points.
ELSEWHERE = (
    (["tp=1,2"], "for several runs: tpi sweep, tpi verify"),
    (["-m", "lr=1,2"], "tpi sweep MODEL lr=1e-3,3e-4"),
    (["--multirun", "tp=1,2"], "tpi verify MODEL tp=1,2"),
    (["--cfg", "job"], "tpi show MODEL KEY=VALUE"),
    (["-c", "job"], "tpi show MODEL KEY=VALUE"),
)


@pytest.mark.parametrize("words, says", ELSEWHERE, ids=[" ".join(words) for words, _ in ELSEWHERE])
def test_the_ways_of_hydra_lead_to_tpis(cli, monkeypatch, words, says):
    monkeypatch.setenv("COLUMNS", "200")
    ended = cli("train", "qwen3_toy", *words)
    assert ended.status == 2
    assert says in ended.err


def test_what_verify_refuses_leads_to_a_sweep(cli):
    ended = cli("verify", "qwen3_toy", "lr=1e-3,3e-4")
    assert ended.status == 2
    assert "tpi sweep" in ended.err


@pytest.mark.parametrize("trace", ("3", "3:3"))
def test_one_traced_step_needs_no_quotes(cli, trace):
    shown = json.loads(cli("show", "qwen3_toy", f"ledger.trace={trace}", "--json").out)
    assert shown["configuration"]["ledger"]["trace"] == trace
    assert "ledger.trace=4:3" in cli("show", "qwen3_toy", "ledger.trace=4:3").err
