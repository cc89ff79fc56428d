"""scripts/gpu: rows are run, kept and left out as they should be."""

import json
import stat
import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu"


@pytest.fixture
def rows_script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))  # gpu_rows.py
    loader = SourceFileLoader("gpu_script", str(SCRIPT))
    spec = spec_from_loader("gpu_script", loader)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_script", module)  # where dataclasses look their module up
    loader.exec_module(module)
    return module


@pytest.fixture
def fake(rows_script, monkeypatch, tmp_path):
    """A `tpi` that writes down what it was asked, and ends with the status that the model's name says."""
    asked = tmp_path / "asked"
    tpi = tmp_path / "tpi"
    tpi.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES: $@" >> {asked}\nexit ${{2#status}}\n')
    tpi.chmod(tpi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(rows_script, "TPI", [str(tpi)])
    command = rows_script.Command
    rows = {
        "small": rows_script.Row(
            2, "", ((command("train status0 tp=2 run.dir={}/0"),), (command("compare status1", 1),))
        ),
        "large": rows_script.Row(8, "", ((command("train status0 tp=8"),),)),
        "wrong": rows_script.Row(2, "", ((command("train status2 dp=2"),), (command("compare status0"),)), alone=True),
    }
    monkeypatch.setattr(rows_script, "ROWS", rows)

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["gpu", "--dir", str(tmp_path / "runs"), *arguments])
        asked.write_text("")
        return rows_script.main(), asked.read_text().splitlines()

    return run


def test_rows_that_fit_are_run_once_and_others_are_named(fake, tmp_path, capsys):
    status, asked = fake("--gpus", "4")
    assert status == 1
    assert asked == [
        f"0,1: train status0 tp=2 run.dir={tmp_path}/runs/small/0 device.peer_memory=never",
        ": compare status1",
        "0,1: train status2 dp=2",
    ]
    lines = capsys.readouterr().out.splitlines()
    assert "small: as it should be" in lines
    assert "large: left out, needs 8 GPUs, 4 here" in lines
    assert any(
        line.startswith("wrong: tpi train status2") and line.endswith("ended with 2 instead of 0") for line in lines
    )
    assert "wrong: failed" in lines
    kept = json.loads((tmp_path / "runs/results.json").read_text())
    assert [entry["status"] for entry in kept["small"]] == [0, 1]

    status, asked = fake("small", "--gpus", "4")
    assert (status, asked) == (0, [])
    assert "small: as it should be, complete before" in capsys.readouterr().out


def test_a_second_try_overwrites_nothing(fake, tmp_path):
    fake("wrong", "--gpus", "2")
    fake("wrong", "--gpus", "2")
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"results.json", "wrong", "wrong-2"}


def test_commands_of_a_stage_share_the_gpus(rows_script, monkeypatch, tmp_path):
    """Four commands of one GPU run at the same time on four; one that needs all waits for them."""
    tpi, times = tmp_path / "tpi", tmp_path / "times"
    tpi.write_text(f'#!/bin/sh\necho "begin $CUDA_VISIBLE_DEVICES" >> {times}\nsleep 0.2\necho end >> {times}\n')
    tpi.chmod(0o755)
    monkeypatch.setattr(rows_script, "TPI", [str(tpi)])
    stage = tuple(rows_script.Command(f"train m{n} tp={tp}") for n, tp in enumerate((1, 1, 1, 1, 4)))
    ends = rows_script.run_rows({"row": rows_script.Row(4, "", (stage,))}, [*"0123"], tmp_path / "runs")
    assert ends == {"row": "as it should be"}
    lines = times.read_text().splitlines()
    whole = lines.index("begin 0,1,2,3")
    assert lines[whole + 1] == "end"
    others = [line for n, line in enumerate(lines) if n not in (whole, whole + 1)]
    assert sorted(others[:4]) == ["begin 0", "begin 1", "begin 2", "begin 3"]


@pytest.mark.parametrize("memory, shares", ((80 << 30, 4), (139 << 30, 7), (24 << 30, 4)))
def test_memory_tells_the_shares(rows_script, monkeypatch, memory, shares):
    """A card with less memory than rows are written for still runs a command alone."""
    from tp_invariant_recipes.machine import gpus

    large, small = (gpus.Gpu("card", (9, 0), bytes_) for bytes_ in (200 << 30, memory))
    monkeypatch.setattr(gpus, "visible", lambda: [large, small])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rows_script.visible() == (["0", "1"], shares)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert rows_script.visible() == (["3", "5"], shares)


def test_commands_share_a_gpu_by_their_shares(rows_script):
    machine = rows_script.Machine(["0", "1"])
    with machine.gpus(2, 1) as first, machine.gpus(1, 3) as second, machine.gpus(1, 3) as third:
        assert (first, sorted(second + third)) == (["0", "1"], ["0", "1"])
        assert machine._fitting(1) == []


@pytest.mark.parametrize("steps, status", ((30, -9), (10, 0)))
def test_a_command_is_killed_at_its_step(rows_script, monkeypatch, tmp_path, steps, status):
    tpi = tmp_path / "tpi"
    tpi.write_text(
        "#!/bin/sh\nfor word; do case $word in run.dir=*) dir=${word#run.dir=};; esac; done\nmkdir -p $dir\n"
        f"for step in $(seq 0 {steps}); do echo $step >> $dir/ledger.jsonl; sleep 0.01; done\n"
    )
    tpi.chmod(0o755)
    monkeypatch.setattr(rows_script, "TPI", [str(tpi)])
    command = rows_script.Command(f"train m run.dir={tmp_path}/run", rows_script.KILLED, kill_at=15)
    assert rows_script.execute(command, command.words.split(), ["0"], tmp_path / "log") == status
    recorded = rows_script.recorded_steps(command.words.split())
    time.sleep(0.4)  # as long as all steps take
    assert rows_script.recorded_steps(command.words.split()) == recorded
    assert (recorded >= 15) is (status == rows_script.KILLED)


@pytest.mark.parametrize("option", ("--list", "--dry-run"))
def test_a_list_runs_nothing(fake, tmp_path, capsys, option):
    status, asked = fake(option, "small")
    assert (status, asked) == (0, [])
    row, *commands = capsys.readouterr().out.splitlines()
    assert row.split() == ["small", "2", "GPUs"]
    trained = f"    tpi train status0 tp=2 run.dir={tmp_path}/runs/small/0 device.peer_memory=never"
    assert commands == ([trained, "    tpi compare status1"] if option == "--dry-run" else [])
    assert not (tmp_path / "runs").exists()


def test_an_unknown_row_is_refused(fake, capsys):
    with pytest.raises(SystemExit) as ended:
        fake("medium")
    assert ended.value.code == 2
    assert "no such row: medium; there are small, large, wrong" in capsys.readouterr().err
