"""The throw-away cluster is what the other tests here take it for: separate hosts that fail as real ones do."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-cluster"

# Every node writes its process and its try, and stays.
STAY = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue
srun bash -c 'echo $$ >{folder}/$(hostname).${{SLURM_RESTART_COUNT:-0}}; while :; do sleep 0.1; done'
"""


@pytest.fixture
def stay(tmp_path: Path) -> Path:
    script = tmp_path / "stay.sh"
    script.write_text(STAY.format(folder=tmp_path))
    return script


def tries(folder: Path) -> dict[str, int]:
    """NODE.TRY of the processes of `stay` that run, and their ids."""
    results = {file.name: file.read_text().strip() for file in folder.glob("n*.*")}
    return {name: int(pid) for name, pid in results.items() if pid and Path(f"/proc/{pid}/exe").exists()}


def interfaces(name: str) -> set[tuple[str, int]]:
    """Names and indices, which no later interface has: another test's cluster may take a name as soon as it is free."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    return {(link["ifname"], link["ifindex"]) for link in links if link["ifname"].startswith(name)}


def namespaces(name: str) -> set[tuple[str, int]]:
    """Names and when they were made, for the same reason; a namespace's number may come again."""
    results = set()
    for file in Path("/run/netns").glob(f"{name}-*"):
        with contextlib.suppress(FileNotFoundError):  # of the other cluster, which ends
            results.add((file.name, file.stat().st_ctime_ns))
    return results


@pytest.mark.release
def test_jobs_of_a_lost_node_restart_elsewhere_and_its_processes_go_on_until_it_is_back(
    cluster, stay: Path, tmp_path: Path
) -> None:
    job = cluster.run("sbatch", "--parsable", "--output=/dev/null", stay)
    cluster.until(lambda: set(tries(tmp_path)) == {"n1.0", "n2.0"})
    cluster.do("fail", "n1")
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1")
    cluster.release(job)
    cluster.until(lambda: set(tries(tmp_path)) == {"n1.0", "n2.1", "n3.1"})
    assert cluster.run("sinfo", "--noheader", "--nodes=n1", "--partition=cpu", "--format=%t") == "down*"
    cluster.do("revive", "n1")
    assert set(tries(tmp_path)) == {"n2.1", "n3.1"}
    assert cluster.run("sinfo", "--noheader", "--nodes=n1", "--partition=cpu", "--format=%t") == "idle"


def test_clusters_do_not_meet(start_cluster: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = start_cluster(nodes=1), start_cluster(nodes=2)
    for cluster, count in ((second, "2"), (first, "1")):
        monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
        assert cluster.run("sinfo", "--noheader", "--partition=cpu", "--format=%D %t") == f"{count} idle"
        assert cluster.run("squeue", "--noheader") == ""
        cluster.run("sbatch", "--hold", "--output=/dev/null", "--wrap=true")


@pytest.mark.usefixtures("_possible")
def test_stop_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, stay: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("slurm")
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")

    def script(command: str, *more: str) -> str:
        ended = subprocess.run([SCRIPT, command, *more], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return ended.stderr

    def own_jobs() -> list[str]:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        return [line for line in listed.splitlines() if str(folder) in line]

    try:
        assert script("start", str(folder)) == ""
        assert f"a cluster runs in {folder}" in script("start", str(folder))
        subprocess.run(["sbatch", "--output=/dev/null", stay], stdout=subprocess.DEVNULL, check=True)
        while len(tries(tmp_path)) < 2:
            time.sleep(0.05)
        name = next(line for line in (folder / "slurm.conf").read_text().splitlines() if "ClusterName" in line)[12:]
        assert len(own_jobs()) >= 5
        made = interfaces(name), namespaces(name)
        assert [len(each) for each in made] == [1 + 3, 3]  # the bridge, and of each node
        daemon = int((folder / "slurmctld.pid").read_text())
        os.kill(daemon, signal.SIGKILL)  # as a run of the tests that was killed may leave it
    finally:
        message = script("stop", str(folder))
    assert message == ""
    assert tries(tmp_path) == {}
    assert own_jobs() == []
    assert made[0] & interfaces(name) == made[1] & namespaces(name) == set()
    assert f"no cluster runs in {folder}" in script("stop", str(folder))


@pytest.mark.usefixtures("_possible")
def test_only_root_can_start_one_and_is_told_so() -> None:
    command = ["setpriv", "--reuid=65534", "--clear-groups", "bash", "-s", "check"]
    with SCRIPT.open() as script:  # read by us: the checkout may be root's alone
        ended = subprocess.run(command, stdin=script, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "only root" in ended.stderr
