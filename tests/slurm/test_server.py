"""The stand-in for the interpreter on nodes: a process of the node's own that SLURM starts, signals and ends as any."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import server


def _told() -> None:
    """Write what this process finds, and wait for a signal or end with a status, as the arguments say."""
    folder, ending = Path(sys.argv[1]), sys.argv[2]

    def note(number: int, _: object) -> None:
        (folder / f"{socket.gethostname()}.signal").write_text(str(number))

    signal.signal(signal.SIGUSR1, note)
    results = {
        "host": socket.gethostname(),
        "address": socket.gethostbyname(socket.gethostname()),
        "private": [file.name for file in Path(os.environ["PRIVATE"]).iterdir()],
        "task": os.environ["SLURM_PROCID"],
        "folder": os.getcwd(),
        "pid": os.getpid(),
    }
    file = folder / f"{socket.gethostname()}.json"
    file.with_suffix(".new").write_text(json.dumps(results))
    file.with_suffix(".new").rename(file)
    print("out of", socket.gethostname())
    while ending == "wait":
        signal.pause()
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(ending))


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with server.serving(tmp_path_factory.mktemp("python"), _told) as executable:
        yield executable


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


def test_it_runs_on_the_node_with_the_words_streams_and_status_of_the_task(
    cluster, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = cluster.folder / "private"
    monkeypatch.setenv("PRIVATE", str(private))
    monkeypatch.chdir(tmp_path)
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", f"touch {private}/of-$(hostname)")
    words = (python, "-m", "tp_invariant_recipes", tmp_path, "0")
    message = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *words)
    assert sorted(message.splitlines()) == ["out of n1", "out of n2"]
    first, second = (json.loads((tmp_path / f"{node}.json").read_text()) for node in ("n1", "n2"))
    assert (first["host"], first["private"], first["folder"]) == ("n1", ["of-n1"], str(tmp_path))
    assert (second["host"], second["private"], second["folder"]) == ("n2", ["of-n2"], str(tmp_path))
    assert {first["task"], second["task"]} == {"0", "1"}
    assert first["address"] != second["address"]
    for ending, status in (("3", 3), ("kill", 137)):
        ended = cluster.ended("srun", "--nodes=1", *words[:-1], ending)
        assert ended.returncode == status, ended.stderr


def test_signals_reach_it_and_it_does_not_outlive_its_task(
    cluster, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE", str(cluster.folder / "private"))
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun {python} -m tp_invariant_recipes {tmp_path} wait\n")
    job = cluster.run("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--output=/dev/null", script)
    results = [tmp_path / f"{node}.json" for node in ("n1", "n2")]
    cluster.until(lambda: all(file.exists() for file in results))
    pids = [json.loads(file.read_text())["pid"] for file in results]
    assert all(map(alive, pids))
    cluster.run("scancel", "--signal=USR1", job)
    cluster.until(lambda: all(file.with_suffix(".signal").exists() for file in results))
    assert all(map(alive, pids))
    cluster.run("scancel", "--signal=KILL", job)
    cluster.until(lambda: not any(map(alive, pids)))
