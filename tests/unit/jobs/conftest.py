# SPDX-License-Identifier: Apache-2.0
"""Submitted runs, and a SLURM that a test tells what to say."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.unit.jobs.fake_slurm import Made, Slurm
from tp_invariant_recipes.jobs import registry, states
from tp_invariant_recipes.runs.run_dir import RunDir


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for name, value in {"PAUSE": 0.01, "LOOK": 0.01}.items():
        monkeypatch.setattr(states, name, value)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def submitted(tmp_path: Path) -> Callable[..., Made]:
    """`submitted("a")` is a submitted run of that name, job 12; with cells a verify, 12 the array and 13 its judge."""

    def make(name: str = "a", job: str = "12", cells: Iterable[str] = (), *, known: bool = True) -> Made:
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        judge = [{"id": str(int(job) + 1), "role": "judge"}] if cells else []
        facts = {
            "schema": 1,
            "kind": "verify" if cells else "train",
            "model": "qwen3_toy",
            "command": "tpi submit qwen3_toy",
            "time": "2026-01-01T12:00:00+0000",
            "directory": str(directory),
            "jobs": [{"id": job, "role": "cells" if cells else "train"}, *judge],
        }
        RunDir(directory).submission.write_text(json.dumps(facts | ({"cells": [*cells]} if cells else {})))
        for run in (directory, *(directory / cell for cell in cells)):
            run.mkdir(exist_ok=True)
            RunDir(run).run.write_text('{"attempts": []}')
        if known:
            registry.remember(directory, [job, *(item["id"] for item in judge)])
        return Made(directory)

    return make
