# SPDX-License-Identifier: Apache-2.0
"""Nodes of a job, without SLURM: each a process of this machine with the variables that srun would set."""

import json
import os
import re
import shutil
import signal
import socket
import time

import pytest

from tests.distributed.faults import at_step, fail, lives, ranks_of, reached, wait_for_ever
from tests.distributed.small_models import SAVED
from tests.ledgers import agree, steps
from tp_invariant_recipes.multinode import agent, rendezvous
from tp_invariant_recipes.runs import checkpoints

SKIPPED = pytest.mark.skip(reason="no network interface beside the loopback")
RUN = ("train", *SAVED, "launcher=slurm", "--continue")


def free_job(after: int = 0) -> str:
    """An id whose port nobody uses."""
    first = max(os.getpid(), after + 1)
    for job in range(first, first + 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", rendezvous.PORTS[job % len(rendezvous.PORTS)])):
                return str(job)
    raise AssertionError("no port is free")


class Nodes:
    """Starts the same command on nodes n0, n1, … of one job, again and again."""

    def __init__(self, tpi, count: int) -> None:
        self.tpi, self.count, self.job = tpi, count, free_job()
        self.restart = 0
        self.started = []

    def start(self, *arguments, absent=(), before=None, environment=None):
        """before: node number -> a fault to plant there. environment: node number -> variables to set there."""
        started = {}
        for number in range(self.count):
            if number not in absent:

                def plant(number=number) -> None:
                    os.environ.update(self.variables(number) | (environment or {}).get(number, {}))
                    (before or {}).get(number, lambda: None)()

                started[number] = self.tpi.start(*arguments, before=plant)
        self.started += started.values()
        self.restart += 1
        return started

    def __call__(self, *arguments, **faults):
        """The exit status of each node, and what they said together."""
        started = self.start(*arguments, **faults)
        statuses = {number: process.wait() for number, process in started.items()}
        return statuses, "\n".join(process.stderr for process in started.values())

    def kill(self) -> None:
        """Kill what still runs, and wait for its ranks: they hold the port where the next nodes meet."""
        running = [process for process in self.started if process.poll() is None]
        ranks = [rank for process in running for rank in ranks_of(process.pid)]
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        while any(map(lives, ranks)):
            time.sleep(0.02)

    def variables(self, number: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": self.job,
            "SLURM_RESTART_COUNT": str(self.restart),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": f"localhost[0-{self.count - 1}]",  # of which the first is no name
            "SLURM_STEP_NUM_NODES": str(self.count),
            "SLURM_STEP_NUM_TASKS": str(self.count),
            "SLURM_PROCID": str(number),
            "SLURMD_NODENAME": f"n{number}",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }

    def attempts(self, run: str) -> list[dict]:
        return json.loads((self.tpi.folder / run / "run.json").read_text())["attempts"]

    def word(self, run: str) -> str:
        return (self.tpi.folder / run / "job.ended").read_text()


@pytest.fixture
def nodes(tpi):
    nodes = Nodes(tpi, 2)
    yield nodes
    nodes.kill()  # what a test that failed left would meet the nodes of the next, whose job has the same id


def here(nodes, each: int = 1) -> tuple[str, ...]:
    """The run with so many ranks on each node."""
    return (*RUN, f"tp={each * nodes.count}", f"cluster.ranks_per_node={each}", f"run.dir={nodes.tpi.folder}/run")


@pytest.fixture(scope="module")
def finished(shared) -> Nodes:
    """The run on two nodes, in folder "run". No test changes it."""
    nodes = Nodes(shared, 2)
    statuses, message = nodes(*here(nodes))
    assert statuses == {0: 0, 1: 0}, message
    return nodes


def test_two_nodes_compute_what_one_machine_does(finished, whole):
    folder, (attempt,) = finished.tpi.folder / "run", finished.attempts("run")
    assert steps(folder) == steps(whole)
    assert finished.word("run") == "completed\n"
    assert (attempt["outcome"], attempt["job"]["id"]) == ("completed", finished.job)
    assert sorted(file.name for file in (folder / "logs").glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
    assert [c.step for c in checkpoints.finished(folder / "checkpoints")] == [2, 4]


OTHERS = [name for _, name in socket.if_nameindex() if name.startswith("e")]  # network interfaces beside the loopback


@pytest.mark.release
@pytest.mark.parametrize(
    "count, interface", ((2, "lo"), (4, "lo"), pytest.param(2, *OTHERS[:1] or ("",), marks=() if OTHERS else SKIPPED))
)
def test_each_map_of_nodes_and_interface_has_one_ledger(tpi, count, interface):
    """Of four ranks; a guard digests all that they send to each other."""
    words = ("qwen3_toy", "model.num_layers=1", "seq=32", "gbs=2", "tp=2", "dp=2", "iters=3", "ledger.state_digests=1")
    words += ("guard=products", "guard.collectives=all")
    tpi("train", *words, "run.dir=one", status=0)
    nodes = Nodes(tpi, count)
    more = (f"cluster.ranks_per_node={4 // count}", f"run.dir={tpi.folder}/run", "launcher=slurm", "--continue")
    variables = {number: {"GLOO_SOCKET_IFNAME": interface} for number in range(count)}
    statuses, message = nodes("train", *words, *more, environment=variables)
    nodes.kill()
    assert set(statuses.values()) == {0}, message
    assert steps(tpi.folder / "run") == steps(tpi.folder / "one")


@pytest.mark.release
def test_a_rank_that_fails_on_another_node_is_named_and_the_job_gives_up_after_its_tries(nodes):
    faults = {"before": {1: at_step(4, fail, ranks=(3,))}}
    first, message = nodes(*here(nodes, each=2), "slurm.tries=2", **faults)
    assert first == {0: 2, 1: 2}
    assert "rank 3 failed: ValueError: planted" in message
    assert "(on n1)" in message
    assert "(start 1 of 2 from step 0; it is queued again)" in message
    assert nodes.word("run") == "requeue\n"
    # The checkpoint of step 2 is progress, so the next tries are counted anew.
    _, message = nodes(*here(nodes, each=2), "slurm.tries=2", **faults)
    assert "(start 1 of 2 from step 2; it is queued again)" in message
    _, message = nodes(*here(nodes, each=2), "slurm.tries=2", **faults)
    assert "(start 2 of 2 from step 2; no more)" in message
    assert nodes.word("run") == "failed\n"
    assert [a["from_step"] for a in nodes.attempts("run")] == [0, 2, 2]
    assert "planted" in nodes.attempts("run")[-1]["why"]


@pytest.mark.release
def test_ranks_that_hang_are_ended_when_another_node_fails(nodes):
    faults = {"before": {0: at_step(3, wait_for_ever), 1: at_step(3, fail)}}
    statuses, message = nodes(*here(nodes), "slurm.tries=1", **faults)
    assert statuses == {0: 2, 1: 2}
    assert "failed: ValueError: planted" in message
    assert "(on n1)" in message


@pytest.mark.release
def test_a_rank_that_hangs_on_another_node_is_named_and_the_job_is_requeued(nodes):
    """Both nodes have a rank that says nothing more; the first one waits for the other."""
    faults = {"before": {1: at_step(4, wait_for_ever)}}
    statuses, message = nodes(*here(nodes), "slurm.tries=2", "run.hang_timeout=30", "save=0", **faults)
    assert statuses == {0: 2, 1: 2}
    assert "error: rank 1 hangs: it has not ended step 4 for " in message
    assert "rank 1 (on n1) in step 4, at tests/distributed/faults.py" in message
    assert re.search(r"rank 0 in step 4, waiting for \w+ called at ", message)
    assert "(start 1 of 2 from step 0; it is queued again)" in message
    assert nodes.word("run") == "requeue\n"


def _on_another_host() -> None:
    """Where the job's port is free."""
    rendezvous.PORTS = range(rendezvous.PORTS.start + 1, rendezvous.PORTS.stop + 1)


@pytest.mark.release
def test_a_try_that_slurm_took_for_dead_leaves_the_run_to_the_next(tpi, whole):
    """SLURM has started the job elsewhere, while its processes went on here. Another job is just refused."""
    alone = Nodes(tpi, 1)
    first = alone.start(*here(alone, each=2), before={0: at_step(4, wait_for_ever)})[0]
    first.until(reached(tpi.folder, 4))
    before = alone.attempts("run")
    stranger = Nodes(tpi, 1)
    stranger.job = free_job(int(alone.job))
    statuses, message = stranger(*here(alone, each=2))
    assert statuses == {0: 2}
    assert f"run is being trained by pid {first.pid} on {os.uname().nodename} since " in message
    assert f"(SLURM job {alone.job})" in message
    assert alone.attempts("run") == before
    second = alone.start(*here(alone, each=2), before={0: _on_another_host})[0]
    assert first.wait() == 2
    assert f"was taken over by pid {second.pid} on " in first.stderr
    assert "this process ends and leaves the run to it" in first.stderr
    assert second.wait() == 0, second.stderr
    assert f"was being trained by pid {first.pid} on " in second.stderr
    assert [(a["outcome"], a["from_step"]) for a in alone.attempts("run")] == [(None, 0), ("completed", 2)]
    assert alone.word("run") == "completed\n"
    assert agree(steps(tpi.folder / "run"), steps(whole))


@pytest.mark.release
def test_tries_that_end_without_a_word_count_too(nodes):
    """A node that dies takes its word with it."""
    arguments = (*here(nodes), "slurm.tries=2", "save=0")
    for step in (2, 3):
        held = at_step(step, wait_for_ever)
        started = nodes.start(*arguments, before={0: held, 1: held})
        started[0].until(reached(nodes.tpi.folder, step))
        nodes.kill()
    assert [a["outcome"] for a in nodes.attempts("run")] == [None, None]
    statuses, message = nodes(*arguments)
    assert statuses == {0: 2, 1: 2}
    assert "2 starts in a row began at step 0, and none reached another checkpoint; no more" in message
    assert nodes.word("run") == "failed\n"
    nodes.job = free_job(int(nodes.job))  # submitted again, it has its tries again
    nodes.restart = 0
    statuses, message = nodes(*arguments)
    assert statuses == {0: 0, 1: 0}, message


def _hears_late() -> None:
    """A slow network: the first node must not have ended by then."""
    get = rendezvous.Rendezvous.get

    def get_late(self, key: str):
        if key == "over":
            time.sleep(0.5)
        return get(self, key)

    rendezvous.Rendezvous.get = get_late


@pytest.mark.release
def test_a_node_that_does_not_come_is_reported(tpi, nodes):
    four = Nodes(tpi, 4)
    statuses, message = four(*here(four), "slurm.rendezvous_timeout=9", absent=(2, 3), before={1: _hears_late})
    assert statuses == {0: 2, 1: 2}
    assert "2 of the nodes localhost[0-3] did not come within 9 s; here: n0, n1" in message
    assert "does not answer" not in message
    statuses, message = nodes(*here(nodes), "slurm.rendezvous_timeout=3", absent=(0,))
    assert statuses == {1: 2}
    assert "n1 did not reach the first of localhost[0-1] at 127.0.0.1, port " in message
    assert "within 3 s" in message


def _another_version() -> None:
    from tp_invariant_recipes.machine import versions

    result = versions.versions()
    agent.versions = lambda: result | {"megatron-core": "0.19.3"}


# What a node may have that the first has not: how it comes by it, and what is said. Trying again would not help.
DISAGREEMENTS = {
    "version": ({"before": {1: _another_version}}, "n1 has another versions: megatron-core is 0.19.3, and "),
    "variable": ({"environment": {1: {"NCCL_ALGO": "Ring"}}}, "n1 has another environment: NCCL_ALGO is Ring, and "),
    "threads": (
        {"environment": {1: {"OMP_NUM_THREADS": "7"}}},
        "n1 has another environment: OMP_NUM_THREADS is 7, and ",
    ),
}


OTHERS = (pytest.param(fault, marks=pytest.mark.release) for fault in ("variable", "threads"))


@pytest.mark.parametrize("fault", ("version", *OTHERS))
def test_nodes_that_would_not_compute_the_same_do_not_begin(nodes, fault):
    faults, words = DISAGREEMENTS[fault]
    statuses, message = nodes(*here(nodes), "slurm.rendezvous_timeout=20", **faults)
    assert set(statuses.values()) == {2}
    assert words in message
    assert not (nodes.tpi.folder / "run" / "ledger.jsonl").exists()


def test_a_run_for_another_number_of_nodes_does_not_begin(nodes):
    statuses, message = nodes(*RUN, "tp=4", "cluster.ranks_per_node=1", f"run.dir={nodes.tpi.folder}/run")
    assert set(statuses.values()) == {2}
    assert "this run takes 4 nodes with 1 cpu rank each, and srun started it on 2: srun --nodes=4" in message


def test_a_run_that_cannot_be_gone_on_with_says_why_in_its_run_directory(finished, nodes):
    shutil.copytree(finished.tpi.folder / "run", nodes.tpi.folder / "run")
    nodes.job, nodes.restart = finished.job, 1
    newest = checkpoints.finished(nodes.tpi.folder / "run" / "checkpoints")[-1].path
    (newest / "__0_0.distcp").unlink()
    statuses, message = nodes(*here(nodes), "iters=6", "scheduler.lr_decay_iters=4")
    assert set(statuses.values()) == {2}
    last = nodes.attempts("run")[-1]
    assert (last["outcome"], last["job"]["restart"], len(nodes.attempts("run"))) == ("failed", 1, 2)
    assert "__0_0.distcp is missing" in last["why"]
    assert "__0_0.distcp is missing" in message


@pytest.mark.release
def test_a_completed_run_that_slurm_restarts_stays_unchanged(finished, nodes):
    shutil.copytree(finished.tpi.folder / "run", nodes.tpi.folder / "run")
    nodes.job, nodes.restart = finished.job, 1
    (nodes.tpi.folder / "run" / "job.ended").unlink()  # as the job's script does
    before = {file: file.read_bytes() for file in (nodes.tpi.folder / "run").iterdir() if file.is_file()}
    statuses, message = nodes(*here(nodes))
    assert set(statuses.values()) == {0}
    assert "completed at step 4 of 4: no step is left to train" in message
    assert nodes.word("run") == "completed\n"
    assert {file: file.read_bytes() for file in before} == before


def test_without_a_run_directory_each_node_would_choose_its_own(nodes):
    statuses, message = nodes(*RUN[:-1], "cluster.ranks_per_node=1")
    assert set(statuses.values()) == {2}
    assert "set run.dir=PATH" in message


def test_outside_of_an_allocation_there_are_no_nodes(tpi):
    refused = tpi(*RUN, "run.dir=run", status=2)
    assert "launcher=slurm needs an allocation of SLURM: salloc, or tpi submit, which makes a job" in refused.stderr
