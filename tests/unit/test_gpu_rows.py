"""scripts/gpu: every row composes, and rows are run, kept and left out as they should be."""

import json
import stat
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import product
from pathlib import Path

import pytest

from tp_invariant_recipes.config.compose import compose

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"


@pytest.fixture
def rows_script(monkeypatch):
    loader = SourceFileLoader("gpu_rows", str(SCRIPT))
    spec = spec_from_loader("gpu_rows", loader)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_rows", module)  # where dataclasses look their module up
    loader.exec_module(module)
    return module


def runs(command: str) -> list[tuple[str, list[str]]]:
    """Model and overrides of every run that a command makes."""
    kind, model, *rest = command.split()
    if kind not in ("train", "verify", "bench", "audit") or model.startswith("-"):
        return []
    overrides = [word for word in rest if "=" in word and not word.startswith("run.dir=")]
    if kind == "audit":
        overrides.append("numerics=stock")  # its default
    pairs = [override.split("=", 1) for override in overrides]
    each = [[f"{key}={value}" for value in values.split(",")] for key, values in pairs]
    return [(model, [*one]) for one in product(*each)]


@pytest.mark.release
def test_every_row_composes_and_fits_the_gpus_that_it_names(rows_script):
    for name, row in rows_script.ROWS.items():
        assert len(row.commands) == len(row.status), name
        found = [run for command in row.commands for run in runs(command)]
        ranks = [compose(model, overrides, device="gpu").config.layout.world for model, overrides in found]
        assert max(ranks) == row.gpus, name


@pytest.fixture
def fake(rows_script, monkeypatch, tmp_path):
    """A `tpi` that writes down what it was asked, and ends with the status that the model's name says."""
    said = tmp_path / "said"
    tpi = tmp_path / "tpi"
    tpi.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit ${{2#status}}\n')
    tpi.chmod(tpi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(rows_script, "TPI", [str(tpi)])
    rows = {
        "small": rows_script.Row(2, "", ("train status0 run.dir={}/0", "compare status1"), (0, 1)),
        "large": rows_script.Row(8, "", ("train status0",), (0,)),
        "wrong": rows_script.Row(2, "", ("train status2", "compare status0"), (0, 0)),
    }
    monkeypatch.setattr(rows_script, "ROWS", rows)

    def run(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["gpu", "--dir", str(tmp_path / "runs"), *arguments])
        said.write_text("")
        return rows_script.main(), said.read_text().splitlines()

    return run


def test_rows_that_fit_are_run_once_and_others_are_named(fake, tmp_path, capsys):
    status, said = fake("--gpus", "4")
    assert status == 1
    assert said == [f"train status0 run.dir={tmp_path}/runs/small/0", "compare status1", "train status2"]
    lines = capsys.readouterr().out.splitlines()
    assert "small: as it should be" in lines
    assert "large: left out, needs 8 GPUs, 4 here" in lines
    assert "wrong: ended with 2 instead of 0" in lines
    assert "wrong: failed" in lines
    kept = json.loads((tmp_path / "runs/results.json").read_text())
    assert [one["status"] for one in kept["small"]] == [0, 1]

    status, said = fake("small", "--gpus", "4")
    assert (status, said) == (0, [])
    assert "small: as it should be, complete before" in capsys.readouterr().out


def test_a_second_try_overwrites_nothing(fake, tmp_path):
    fake("wrong", "--gpus", "2")
    fake("wrong", "--gpus", "2")
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"results.json", "wrong", "wrong-2"}


@pytest.mark.parametrize("option", ("--list", "--dry-run"))
def test_a_list_runs_nothing(fake, tmp_path, capsys, option):
    status, said = fake(option, "small")
    assert (status, said) == (0, [])
    row, *commands = capsys.readouterr().out.splitlines()
    assert row.split() == ["small", "2", "GPUs"]
    trained = f"    tpi train status0 run.dir={tmp_path}/runs/small/0"
    assert commands == ([trained, "    tpi compare status1"] if option == "--dry-run" else [])
    assert not (tmp_path / "runs").exists()


def test_an_unknown_row_is_refused(fake, capsys):
    with pytest.raises(SystemExit) as ended:
        fake("medium")
    assert ended.value.code == 2
    assert "no such row: medium; there are small, large, wrong" in capsys.readouterr().err
