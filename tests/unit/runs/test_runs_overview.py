# SPDX-License-Identifier: Apache-2.0
"""`tpi runs` and what a run's end says, from run directories without a training."""

import errno
import functools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ledgers
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch import plan, record
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.runs import overview, restarts
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("no_gpus")

LOSSES = ("f32:40c80000", "f32:40c70000", "f32:40c60000")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current directory, which has runs/."""
    (tmp_path / "here" / "runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def _command(monkeypatch):
    """What the attempts of the runs were started with."""
    monkeypatch.setattr("sys.argv", ["/usr/bin/tpi", "train", "qwen3_toy"])


_composed = functools.cache(lambda *overrides: compose("qwen3_toy", ["iters=3", *overrides], device="cpu"))


def planned_in(path: str, *overrides: str) -> plan.Plan:
    """The plan of `tpi train qwen3_toy iters=3 … run.dir=PATH`."""
    composed, where = _composed(*overrides), f"run.dir={path}"
    config = composed.config.with_fields("run", dir=path)
    return plan.new(replace(composed, config=config, overrides=(*composed.overrides, *parse_all([where]))))


def a_run(name: str, *overrides: str, steps: int = 3, outcome: str | None = "completed", minute: int = 0) -> Path:
    """A run of three steps, of which the ledger has so many. outcome: of its only attempt; None: killed."""
    path = Path("runs", name)
    planned = planned_in(str(path), *overrides)
    record.write(planned)
    run = json.loads((path / "run.json").read_text())
    run["attempts"][0] |= {"outcome": outcome, "time": f"2026-01-01T00:{minute:02}:00+0000"}
    (path / "run.json").write_text(json.dumps(run))
    header = Header(identity=planned.identity, layout=planned.layout.as_dict())
    ledgers.write(path, header, (ledgers.record(n, loss=loss) for n, loss in enumerate(LOSSES[:steps], 1)))
    return path


def cells(line: str) -> list[str]:
    return line.split()


def test_a_line_for_each_run_with_one_fingerprint_where_they_are_comparable(cli):
    a_run("a", "tp=2", minute=3)
    a_run("b", minute=1, outcome="stopped", steps=2)
    a_run("deeper/c", "seed=7", minute=2, outcome=None, steps=0)
    ended = cli("runs")
    assert (ended.status, ended.err) == (0, "")
    head, *lines = map(cells, ended.out.splitlines())
    assert head == ["run", "state", "step", "loss", "layout", "model", "numerics", "fingerprint"]
    assert [line[:-1] for line in lines] == [
        ["runs/b", "stopped", "2/3", "6.21875", "tp=1", "qwen3_toy", "tree"],
        ["runs/deeper/c", "killed", "0/3", "tp=1", "qwen3_toy", "tree"],
        ["runs/a", "completed", "3/3", "6.1875", "tp=2", "qwen3_toy", "tree"],
    ]
    b, c, a = (line[-1] for line in lines)
    assert (a == b, a == c, len(a)) == (True, False, 8)
    result = json.loads(cli("runs", "runs", "--json").out)
    assert result["schema"] == 1
    assert [row["identity_hash"][:8] for row in result["runs"]] == [b, c, a]
    assert result["runs"][2]["loss"] == {"bits": LOSSES[2], "value": 6.1875}


def test_a_run_that_is_being_trained_runs_and_a_copy_of_it_does_not():
    path = a_run("a", outcome=None, steps=1)
    with locked(RunDir(path)):
        shutil.copytree(path, "runs/copy")
        assert [row.state for row in overview.rows(Path("runs"))] == ["running", "killed"]
    assert overview.row(path).state == "killed"


def test_a_submitted_run_has_not_started():
    record.write(planned_in("runs/a"), attempt=False)
    (row,) = overview.rows(Path("runs"))
    assert (row.state, row.step, row.last.to_step) == ("not started", 0, None)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


# What is done to a run directory, and the reason that its row has.
DAMAGE = {
    "run.json: No such file or directory": lambda run: (run / "run.json").unlink(),
    "run.json: not JSON": lambda run: (run / "run.json").write_text("{"),
    "run.json: identity_hash is missing": lambda run: (run / "run.json").write_text('{"model": "", "attempts": []}'),
    "run.json: a FIFO, not a file": lambda run: _fifo(run / "run.json"),
    "ledger.jsonl: empty file": lambda run: (run / "ledger.jsonl").write_text(""),
    "ledger.jsonl: only part of its header": lambda run: (run / "ledger.jsonl").write_text('{"kind": "tpi-ledger"'),
    "ledger.jsonl: not a ledger": lambda run: (run / "ledger.jsonl").write_text("a\nb\n"),
    "ledger.jsonl: a FIFO, not a file": lambda run: _fifo(run / "ledger.jsonl"),
    "ledger.jsonl: No such file or directory": lambda run: (run / "ledger.jsonl").unlink(),
    "ledger.jsonl: loss.bits": lambda run: append(run, b'{"step": 4, "loss": {"bits": 1}}\n'),
    "ledger.jsonl: step": lambda run: append(run, b'{"step": -4, "loss": null}\n'),
    "ledger.jsonl: its last two lines are damaged": lambda run: append(run, b"x\ny\n"),
}


def append(run: Path, data: bytes) -> None:
    with (run / "ledger.jsonl").open("ab") as stream:
        stream.write(data)


def test_a_damaged_run_is_a_row_with_the_reason(cli):
    a_run("whole")
    for number, damage in enumerate(DAMAGE.values()):
        damage(a_run(f"damaged-{number:02}", minute=number))
    ended = cli("runs")
    assert (ended.status, ended.err) == (0, "")
    lines = sorted(line for line in ended.out.splitlines() if line.startswith("runs/damaged"))
    assert {cells(line)[1] for line in lines} == {"damaged"}
    assert [why for why, line in zip(DAMAGE, lines, strict=True) if why not in line] == []
    assert [cells(line)[:2] for line in ended.out.splitlines()].count(["runs/whole", "completed"]) == 1


def test_a_torn_line_does_not_count_and_a_line_over_it_does_not_either():
    run = a_run("a")
    append(run, b'{"step": 4, "lo')
    assert overview.row(run).step == 3
    append(run, b"\n")
    assert overview.row(run).step == 3


def test_links_in_a_circle_end_and_names_control_no_terminal(cli):
    a_run("a")
    Path("runs/loop").symlink_to(Path("..", "runs"))
    a_run("b\x1b[31m")
    ended = cli("runs")
    assert ended.out.count("completed") == 2
    assert "\x1b" not in ended.out
    assert "b\\x1b[31m" in ended.out


def test_a_folder_that_cannot_be_looked_into_is_a_row_and_no_run_beside_it_fails(monkeypatch):
    _, closed = a_run("a"), a_run("b")

    def denied_by(call):
        def denied(path, *arguments):
            if Path(path).parent.name == closed.name:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *arguments)

        return denied

    monkeypatch.setattr(Path, "is_file", denied_by(Path.is_file))
    monkeypatch.setattr(os, "open", denied_by(os.open))
    assert [(row.state, row.why) for row in overview.rows(Path("runs"))] == [
        ("damaged", "run.json: Permission denied"),
        ("completed", None),
    ]


def made_by(run: Path, command: str) -> Path:
    """The run, as a command made it for itself."""
    result = json.loads((run / "run.json").read_text())
    result["attempts"][0]["command"] = command
    (run / "run.json").write_text(json.dumps(result))
    return run


def test_runs_that_commands_made_for_themselves_are_hidden_unless_asked_for(cli):
    a_run("a")
    for number, maker in enumerate(overview.MAKERS):
        made_by(a_run(f"{maker}-1/x", minute=number + 1), f"tpi {maker} qwen3_toy")
    submitted = a_run("cells/tp2", minute=9).parent  # its job calls tpi train
    (submitted / "matrix.json").touch()
    (submitted / "tp4").mkdir()
    (submitted / "tp4" / "ledger.jsonl").touch()
    made_by(a_run("verify-of-mine"), "tpi train qwen3_toy run.dir=verify bisect")

    def names(*words: str) -> list[str]:
        return [line.split()[0].removeprefix("runs/") for line in cli("runs", *words).out.splitlines()[1:]]

    assert names() == ["a", "verify-of-mine"]
    cells = [f"{maker}-1/x" for maker in overview.MAKERS]
    assert sorted(names("--all")) == sorted(["a", "verify-of-mine", *cells, "cells/tp2", "cells/tp4"])
    assert sorted(names("runs/cells")) == ["cells/tp2", "cells/tp4"]
    assert names("runs/bisect-1") == names("runs/bisect-1/x") == ["bisect-1/x"]
    assert cli("runs").err == "hidden: 6 runs of verify, bench, bisect, audit; tpi runs --all lists them\n"
    result = json.loads(cli("runs", "--json").out)
    assert (len(result["runs"]), result["hidden"]) == (2, 6)
    assert json.loads(cli("runs", "--json", "--all").out)["hidden"] == 0
    shutil.rmtree("runs/a")
    shutil.rmtree("runs/verify-of-mine")
    assert (cli("runs").out, cli("runs").status) == ("no run below runs\n", 0)


@pytest.mark.parametrize("code, state", ((errno.ENOSPC, "failed"), (errno.EDQUOT, "failed"), (errno.EIO, "killed")))
def test_a_run_whose_end_did_not_fit_on_the_disk_says_disk_full(cli, monkeypatch, code, state):
    run = a_run("a", outcome=None, steps=1)

    def no_room(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_room)
        with pytest.raises(RunError, match="cannot write"):
            restarts.end(RunDir(run), "failed", "rank 0 failed")
    line = cli("runs").out.splitlines()[1]
    assert cells(line)[1] == state
    assert line.endswith("disk full") is (state == "failed")
    # A later attempt has an end of its own.
    record.write(replace(planned_in("runs/b"), run_dir=RunDir(run)))
    assert overview.row(run).state == "killed"


def test_no_folder_and_no_run(cli):
    assert cli("runs").out == "no run below runs\n"
    ended = cli("runs", "nowhere")
    assert (ended.status, ended.err) == (2, "error: nowhere: there is no such folder\n")


def test_the_end_of_a_run_says_where_things_are():
    run = RunDir(a_run("a b", minute=1))
    next_ = "next: tpi compare 'runs/a b' RUN_B   tpi report 'runs/a b'"
    assert overview.place_lines(run) == ["ledger: runs/a b/ledger.jsonl", next_]
    for place in ("tensorboard", "wandb/offline-run-1-x", "mlflow", "comet/1.zip"):
        (run.path / place).mkdir(parents=True)
    assert overview.place_lines(run) == [
        "ledger: runs/a b/ledger.jsonl",
        "tensorboard --logdir 'runs/a b/tensorboard'",
        "wandb sync --append 'runs/a b/wandb'/offline-run-*",
        "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri 'runs/a b/mlflow'",
        "comet upload 'runs/a b/comet'/*.zip",
        next_,
    ]
    (run.path / "wandb" / "offline-run-1-x").rename(run.path / "wandb" / "run-1-x")
    assert overview.places(run)["wandb"] is None
