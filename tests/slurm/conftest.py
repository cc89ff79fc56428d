# SPDX-License-Identifier: Apache-2.0
"""Real SLURM: every test gets a cluster of its own, which takes less than a second (scripts/slurm-cluster).

Login-node commands run in forks (`tpi`), jobs in real processes. Clusters do not meet, so workers of pytest need no
lock, and no test finds jobs or dead nodes of another. Where a cluster cannot be started the tests are skipped, with the
reason; with TPI_SLURM_TESTS=required, as in .ci/run, they fail.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm import server

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-cluster"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any test module imports torch, as in tests/distributed


@dataclass(frozen=True)
class Cluster:
    """A running cluster: nodes n1, n2, … with 4 CPUs and 8 pretended GPUs each; partitions cpu and short.

    folder: holds slurm.conf, log/, and private/, which is another folder on every node.
    """

    folder: Path

    def do(self, command: str, *arguments: object) -> None:
        """A command of scripts/slurm-cluster."""
        _script(command, self.folder, *arguments)

    def run(self, *command: object) -> str:
        """A command of SLURM's: `cluster.run("sbatch", "--parsable", script)`. Its standard output."""
        ended = self.ended(*command)
        assert ended.returncode == 0, f"{ended.args} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def ended(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A command of SLURM's, however it ends."""
        return subprocess.run([str(word) for word in command], capture_output=True, text=True)

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job, or of an array's cell ("12_3"): JobState, Restarts, NodeList, StartTime, …"""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, …"""
        return self.job(job)["JobState"]

    def release(self, job: str) -> None:
        """Start a requeued job again now, not after the two minutes that SLURM waits."""
        self.until(lambda: self.state(job) == "PENDING")  # while it completes, SLURM would forget the new time
        time.sleep(3)  # slurmd takes a credential of the second in which it revoked the last try's for revoked, too
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def until(self, condition: Callable[[], bool], within: float = 120) -> None:
        """Wait for something to happen; within: seconds."""
        end = time.monotonic() + within
        while not condition():
            assert time.monotonic() < end, f"not within {within} s; jobs and nodes now:\n{self._overview()}"
            time.sleep(0.1)

    def _overview(self) -> str:
        return "\n".join(
            subprocess.run(words, capture_output=True, text=True).stdout
            for words in (["squeue", "--states=all", "--long"], ["sinfo", "--Node", "--long"])
        )


def _script(*arguments: object) -> None:
    ended = subprocess.run([SCRIPT, *map(str, arguments)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="session")
def _possible() -> None:
    check = subprocess.run([SCRIPT, "check"], stderr=subprocess.PIPE, text=True)
    if check.returncode:
        refuse = pytest.fail if os.environ.get("TPI_SLURM_TESTS") == "required" else pytest.skip
        refuse(check.stderr.strip())


@pytest.fixture
def cluster(
    _possible: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Three nodes."""
    folder = tmp_path_factory.mktemp("slurm")  # short: the path of a socket may be
    _script("start", folder, 3, 200)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    try:
        yield Cluster(folder)
    finally:
        _script("stop", folder)


@pytest.fixture(scope="session")
def python_on_nodes(bridge: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Stands for the interpreter on nodes: forks of this worker instead of imports (tests/slurm/server.py)."""
    with server.serving(tmp_path_factory.mktemp("python")) as executable:
        yield executable
