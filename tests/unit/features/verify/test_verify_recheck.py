# SPDX-License-Identifier: Apache-2.0
"""`tpi verify --exitfirst` and `--last-failed` without a training: which cells are trained, and which are kept."""

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import ledgers
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.verify import workflow as verify
from tp_invariant_recipes.features.verify.verdict import SweepVerdict, judge
from tp_invariant_recipes.launch import local, record
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.runs import restarts, sweep_dir
from tp_invariant_recipes.runs.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("here", "no_gpus")

SAME, OTHER = "f32:40c80000", "f32:40c80001"


def trains(monkeypatch, **ends) -> list[str]:
    """Have each cell end so, instead of training: its loss, "failed" or "stopped"; SAME unless named. Returns names."""
    trained = []

    def train(cell, planned, watch):
        trained.append(cell.name)
        end = ends.get(cell.name, SAME)
        record.write(planned)
        steps = {"failed": 0, "stopped": 1}.get(end, cell.steps)
        header = Header(
            identity=planned.identity, layout=planned.layout.as_dict(), numerics=planned.config.section("numerics")
        )
        if not planned.run_dir.ledger.exists():
            loss = OTHER if end == OTHER else SAME
            ledgers.write(planned.run_dir.path, header, (ledgers.record(n + 1, loss=loss) for n in range(steps)))
        restarts.end(planned.run_dir, end if end in ("failed", "stopped") else "completed", "planted")
        return {"failed": None, "stopped": local.Outcome.STOPPED}.get(end, local.Outcome.COMPLETED)

    monkeypatch.setattr(verify, "_train", train)
    return trained


def verified(*, exitfirst: bool = False) -> SweepVerdict:
    overrides = ["tp=1,2,4", "iters=2"]
    planned = verify.new("qwen3_toy", overrides, against=None, directory=Path("m"))
    return verify.execute(planned, lambda *_: nullcontext(), exitfirst=exitfirst)


def cell_states(verdict: SweepVerdict) -> list[str]:
    return [row.state for row in verdict.rows]


def test_it_ends_with_the_first_that_differs_and_says_different(monkeypatch):
    trained = trains(monkeypatch, tp2=OTHER)
    verdict = verified(exitfirst=True)
    assert trained == ["tp1", "tp2"]
    assert (verdict.verdict, verdict.exit_status) == ("different", 1)
    assert cell_states(verdict) == ["reference", "different", "not run"]
    assert verdict.remarks[-1] == "--exitfirst: tp=4 did not run; tpi verify --last-failed --dir m trains the rest."
    assert judge(Path("m")).exit_status == 2  # of the directory alone, a cell is missing


def test_it_ends_with_the_first_that_fails_and_says_incomplete(monkeypatch):
    trained = trains(monkeypatch, tp1="failed")
    verdict = verified(exitfirst=True)
    assert trained == ["tp1"]
    assert (verdict.verdict, verdict.exit_status) == ("incomplete", 2)
    assert verdict.advice == "tpi verify --last-failed --dir m"


def test_what_has_not_passed_is_replanned_and_the_rest_is_kept(monkeypatch):
    trained = trains(monkeypatch, tp2=OTHER, tp4="stopped")
    assert cell_states(verified()) == ["reference", "different", "stopped"]
    assert trained == ["tp1", "tp2", "tp4"]
    kept = Path("m/tp1/ledger.jsonl").stat().st_mtime_ns
    repeated = verify.plan_rerun(Path("m"))
    assert isinstance(repeated, verify.Verification)
    assert (list(repeated.plans), repeated.anew) == (["tp2", "tp4"], {"tp2"})
    Path("m/tp4/ledger.jsonl").unlink()  # what stands for going on is a ledger of all steps
    trained = trains(monkeypatch)
    verdict = verify.execute(repeated, lambda *_: nullcontext())
    assert trained == ["tp2", "tp4"]
    assert (verdict.exit_status, cell_states(verdict)) == (0, ["reference", "identical", "identical"])
    assert Path("m/tp1/ledger.jsonl").stat().st_mtime_ns == kept
    assert len(restarts.read_restarts(RunDir(Path("m/tp2")))) == 1
    assert len(restarts.read_restarts(RunDir(Path("m/tp4")))) == 2
    assert OTHER in Path("m/set-aside/tp2/ledger.jsonl").read_text()
    passed = verify.plan_rerun(Path("m"))
    assert isinstance(passed, SweepVerdict)
    assert passed.exit_status == 0


def test_nothing_set_aside_is_overwritten(monkeypatch):
    trains(monkeypatch, tp4=OTHER)
    verified()
    for _ in range(2):
        repeated = verify.plan_rerun(Path("m"))
        assert isinstance(repeated, verify.Verification)
        assert verify.execute(repeated, lambda *_: nullcontext()).exit_status == 1
    assert sorted(path.name for path in Path("m/set-aside").iterdir()) == ["tp4", "tp4-2"]


@pytest.mark.parametrize("change", ("identity_hash", "layout", "steps"))
def test_a_cell_that_would_be_another_run_is_not_trained(monkeypatch, change):
    trains(monkeypatch, tp2="failed")
    verified()
    result = json.loads(Path("m/matrix.json").read_text())
    result["cells"][1][change] = {"identity_hash": "0" * 64, "layout": {"tp": 4}, "steps": 7}[change]
    Path("m/matrix.json").write_text(json.dumps(result))
    with pytest.raises(ConfigError, match=rf"would be another run now than the one planned \({change}\)"):
        verify.plan_rerun(Path("m"))


def test_the_newest_is_taken_where_none_is_named(cli, monkeypatch):
    ended = cli("verify", "--last-failed")
    assert (ended.status, ended.out) == (2, "")
    assert "there is no directory of tpi verify in runs; name one: --dir DIR" in ended.err
    trains(monkeypatch)
    verified()
    Path("runs").mkdir()
    shutil.copytree("m", "runs/old")
    shutil.copytree("m", "runs/new")
    for name, time in (("old", 1), ("new", 2)):
        os.utime(Path("runs", name, "matrix.json"), (time, time))
    assert sweep_dir.latest(Path("runs")) == Path("runs/new")
    ended = cli("verify", "--lf")
    assert ended.status == 0
    assert "identical: tp=1, 2, 4 are bitwise identical over 2 steps" in ended.out


@pytest.mark.parametrize("words", (("qwen3_toy", "--last-failed"), ("--last-failed", "--recheck", "m")), ids=" ".join)
def test_it_takes_its_runs_from_a_directory(cli, words):
    ended = cli("verify", *words)
    assert ended.status == 2
    assert "--last-failed takes its runs from a directory of tpi verify" in ended.err


def test_a_recheck_trains_nothing_that_could_be_omitted(cli):
    assert "leave MODEL, overrides, --dir and --exitfirst out" in cli("verify", "--recheck", "m", "-x").err
