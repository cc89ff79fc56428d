# SPDX-License-Identifier: Apache-2.0
"""What a node takes from SLURM's variables, and which tries count."""

import os
import socket
import stat
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch.ranks import Failure, Outcome, RankFailed, Stop
from tp_invariant_recipes.ledger.run_files import Restart
from tp_invariant_recipes.multinode import agent, rendezvous
from tp_invariant_recipes.multinode.rendezvous import NodeInfo
from tp_invariant_recipes.runs.restarts import consecutive_failures
from tp_invariant_recipes.runs.run_dir import RunDir

STEP = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[03-05,7]", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURMD_NODENAME": "n05",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3",
}  # fmt: skip


@pytest.fixture(autouse=True)
def names_joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names that have an address; no other has one."""
    known: dict[str, str] = {}

    def look_up(name: str) -> str:
        if name not in known:
            raise socket.gaierror(name)
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    return known


def test_a_place_is_what_srun_says():
    result = rendezvous.node_info(STEP)
    assert (result.job, result.restart, result.number, result.count, result.name) == ("41", 0, 2, 4, "n05")
    assert (result.first, result.address) == (False, "10.0.0.3")
    assert rendezvous.node_info(STEP | {"SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "0"}).first
    assert rendezvous.node_info({name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}) is None


@pytest.mark.parametrize(
    "listed, first", (("n[03-05,7]", "n03"), ("m1,n[2-3]", "m1"), ("gpu-a[7],b1", "gpu-a7"), ("alone", "alone"))
)
def test_the_first_node_is_located_by_its_name(names_joined, listed, first):
    names_joined[first] = "10.9.9.9"
    assert rendezvous.node_info(STEP | {"SLURM_STEP_NODELIST": listed}).address == "10.9.9.9"


def test_more_than_one_task_a_node_is_refused():
    with pytest.raises(RunError, match="8 tasks on 4 nodes; it must be one a node"):
        rendezvous.node_info(STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_ports_are_below_those_that_linux_gives_away():
    ports = {rendezvous.node_info(STEP | {"SLURM_JOB_ID": str(job)}).port for job in range(12_000)}
    assert len(ports) == 12_000
    assert (min(ports), max(ports)) == (20_000, 31_999)


@pytest.mark.parametrize(
    "before, start, count",
    (
        ((), 0, 0), (((0, "failed"), (0, None)), 0, 2), (((0, "failed"), (0, "stopped"), (0, "failed")), 0, 1),
        (((0, "failed"), (0, "failed")), 4, 0), (((0, "failed"), (4, "failed")), 4, 1),
        (((4, "failed"), (0, "failed")), 4, 0), (((0, "completed"),), 0, 0),
    ),
)  # fmt: skip
def test_only_tries_since_the_last_progress_count(before, start, count):
    attempts = [Restart(from_step=step, outcome=outcome) for step, outcome in before]
    assert consecutive_failures(attempts, start) == count


@pytest.mark.parametrize(
    "stop, signals, resumable",
    (
        (Stop(), 0, False), (Stop(requeue=True), 1, True), (Stop(requests=1), 1, False),
        (Stop(requests=1, requeue=True), 1, False), (Stop(requests=2, requeue=True), 2, False),
    ),
)  # fmt: skip
def test_a_request_to_stop_wins_over_one_to_go_on_elsewhere(stop, signals, resumable):
    assert (stop.signals, stop.resumable) == (signals, resumable)


FIRST = NodeInfo(str(os.getpid()), 0, 0, 3, "n0", "n[0-2]", "127.0.0.1")
SECOND = replace(FIRST, number=1, name="n1")


@pytest.fixture
def first(tmp_path):
    """The rendezvous of three nodes, as the first of them has joined it."""
    joined = rendezvous.Rendezvous(FIRST, tmp_path / "run", Stop(), 5)
    yield joined
    joined.close()
    assert not list((tmp_path / "run").iterdir())


def secret(tmp_path) -> Path:
    (file,) = (tmp_path / "run").iterdir()
    return file


def test_nodes_of_the_user_join_by_a_secret_that_no_other_can_read(first, tmp_path):
    assert stat.S_IMODE(secret(tmp_path).stat().st_mode) == 0o600
    RunDir(tmp_path / "run").lock.touch()  # whose holder begins there
    assert RunDir(tmp_path / "run").is_empty()
    RunDir(tmp_path / "run").lock.unlink()
    second = rendezvous.Rendezvous(SECOND, tmp_path / "run", Stop(), 5)
    second.set("alive/1", 3)
    assert first.wait("alive/1", 20) == 3
    first.set("next", 77)
    assert second.wait("next", 5) == 77


def _other_secret(file: Path) -> None:
    file.unlink()
    file.touch(0o600)
    file.write_bytes(bytes(rendezvous.MAC))


@pytest.mark.parametrize("change", (_other_secret, Path.unlink, lambda file: file.chmod(0o644)))
def test_a_node_without_the_secret_or_with_one_that_others_know_does_not_join(first, tmp_path, change):
    change(secret(tmp_path))
    with pytest.raises(RunError, match=r"n1 does not see in .*/run what the first of n\[0-2\] wrote: set run.dir to"):
        rendezvous.Rendezvous(SECOND, tmp_path / "run", Stop(), 0.3)


def test_what_a_stranger_sets_or_takes_from_another_key_is_refused(first):
    first.set("alive/1", 3)
    for data in (b"3", b"", bytes(rendezvous.MAC) + b"3", first.store.get("alive/1")):
        first.store.set("alive/2", data)
        with pytest.raises(RunError, match="a process that is no node of this job sets alive/2 at its rendezvous"):
            first.get("alive/2")


def test_values_are_read_at_once_when_all_are_there(first):
    keys = ["alive/1", "alive/2"]
    first.set("alive/2", 7)
    assert first.get_all(keys) is None
    first.set("alive/1", 3)
    assert first.get_all(keys) == [3, 7]
    assert first.get_all([]) == []
    first.set("alive/1", {})
    with pytest.raises(RunError, match="sets alive/1 to what no node of it sets"):
        first.get_all(keys)


@pytest.mark.parametrize("beating", (True, False))
def test_a_node_that_falls_silent_is_named_and_one_that_beats_is_not(first, monkeypatch, beating):
    monkeypatch.setattr(rendezvous, "LOST", 0.05)
    look = rendezvous.Heartbeat(first).look
    first.set("arrived/2", rendezvous.Arrived("n2", (), "127.0.0.1"))

    def looks() -> None:
        for n in range(4):
            first.set("alive/1", n)
            first.set("alive/2", n if beating else 0)
            look()
            time.sleep(0.04)

    if beating:
        looks()
        return
    with pytest.raises(RunError, match=r"^n2 of n\[0-2\] has sent no heartbeat for 0 s"):
        looks()


def test_a_node_that_waits_for_the_end_of_the_run_sees_it_between_two_looks(first, tmp_path, monkeypatch):
    stopped = Stop(requests=1)
    second = rendezvous.Rendezvous(SECOND, tmp_path / "run", stopped, 60)
    over, get = rendezvous.Over("stopped"), second.get

    def get_late(key: str) -> object:
        """The first node says it right after this one has looked."""
        value = get(key)
        if key == "over":
            first.set("over", over)
        return value

    monkeypatch.setattr(second, "get", get_late)
    assert agent._run_other_node(second, None) == over
    assert first.wait("left/1", 20) is True  # a store does not confirm what it is told


# Failures of three nodes: when each began, whether hardware is broken -> the node that is named.
FAILURES = (
    (((3.0, False), (2.0, False), (5.0, False)), "n1"),
    (((3.0, False), (2.0, False), (5.0, True)), "n2"),
    (((0.0, False), (2.0, False), (5.0, True)), "n0"),  # a rank that something has killed
)


@pytest.mark.parametrize("failures, named", FAILURES)
def test_of_several_nodes_that_fail_the_cause_is_named(first, tmp_path, failures, named):
    for number, (cause, hardware) in enumerate(failures):
        failure = Failure(f"of n{number}", cause, user_error=hardware, hardware=hardware, node=f"n{number}")
        first.set(f"ended/{number}", failure)
    error = agent._first_cause(first, RunDir(tmp_path / "run"), rendezvous.PeerFailed())
    assert str(error) == f"of {named}\n(on {named})"
    assert error.failure.hardware is (named == "n2")


def test_a_failure_of_another_node_that_comes_with_its_end_is_no_success(first, tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "_run_ranks", lambda *_: Outcome.COMPLETED)
    first.others = [1]
    first.set("ended/0")
    first.set("ended/1", Failure("of n1", 1.0, node="n1"))
    task = SimpleNamespace(watch=lambda planned: nullcontext(lambda: None))
    with pytest.raises(RankFailed, match="of n1"):
        agent._train(first, task, SimpleNamespace(run_dir=RunDir(tmp_path / "run")), None)
