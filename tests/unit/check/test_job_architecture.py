"""A job's image or interpreter must be for the processors of its nodes."""

import platform
import struct
import sys
from pathlib import Path

import pytest

from tp_invariant_recipes.check.hosts import job as job_rules
from tp_invariant_recipes.config.compose import compose

MACHINES = {"x86_64": (62, b"02"), "aarch64": (183, b"04")}


def elf(file: Path, machine: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 2, MACHINES[machine][0]) + bytes(40))
    return file


def sif(file: Path, machine: str) -> Path:
    head = (
        b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + MACHINES[machine][1] + b"\0"
    )
    file.write_bytes(head + bytes(64))
    return file


def problems_of(*overrides: str) -> list[str]:
    config = compose("qwen3_toy", ["slurm.time=1:00:00", *overrides], device="gpu").config
    return [str(problem) for problem in job_rules.other_processors(config)]


def image(tmp_path: Path, machine: str) -> list[str]:
    file = sif(tmp_path / "a.sif", machine)
    return [f"cluster.container={file}", "cluster.container_runtime=apptainer", "cluster.python=python3"]


def folder(tmp_path: Path, machine: str) -> list[str]:
    elf(tmp_path / "root/usr/bin/env", machine)
    return [f"cluster.container={tmp_path}/root", "cluster.container_runtime=apptainer", "cluster.python=python3"]


def interpreter(tmp_path: Path, machine: str) -> list[str]:
    return [f"cluster.python={elf(tmp_path / 'python', machine)}"]


CLUSTERS = {"h100": "x86_64", "gb300": "aarch64", "gh200": "aarch64"}


@pytest.mark.parametrize(
    "cluster, machine, made",
    (
        pytest.param(*nodes, made, marks=() if n == m else pytest.mark.release)
        for n, nodes in enumerate(CLUSTERS.items())
        for m, made in enumerate((image, folder, interpreter))
    ),
)
def test_what_runs_a_job_is_for_its_nodes(tmp_path, cluster, machine, made):
    (other,) = set(MACHINES) - {machine}
    assert problems_of(f"cluster={cluster}", *made(tmp_path, machine)) == []
    (problem,) = problems_of(f"cluster={cluster}", *made(tmp_path, other))
    assert problem.startswith(("cluster.container=", "cluster.python="))
    assert problem.endswith(f" is for {other}, and the nodes of cluster={cluster} are {machine}")


@pytest.mark.parametrize("machine", MACHINES)
def test_this_environment_is_judged_where_nothing_else_is_named(monkeypatch, machine):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    wrong = {"x86_64": "gb300", "aarch64": "h100"}[machine]
    (problem,) = problems_of(f"cluster={wrong}")
    assert problem.startswith(
        f"this environment ({sys.prefix}) is for {machine}, and the nodes of cluster={wrong} are "
    )
    assert "cluster.container=IMAGE, or cluster.python=PATH" in problem
    assert problems_of(f"cluster={'h100' if machine == 'x86_64' else 'gb300'}") == []


def test_what_cannot_be_read_is_taken_as_correct(tmp_path):
    (tmp_path / "text").write_text("#!/bin/sh\n")
    for name in ("python3", "/nowhere/python", f"{tmp_path}/text", str(tmp_path)):
        assert problems_of("cluster=gb300", f"cluster.python={name}") == []
    assert problems_of("cluster.ranks_per_node=1") == []
