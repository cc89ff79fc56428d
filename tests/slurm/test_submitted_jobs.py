# SPDX-License-Identifier: Apache-2.0
"""What people do with `tpi submit`, on a real SLURM: follow, requeue, lose a node, meet the time limit, verify."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forks
from tests.distributed.guard_faults import Planted
from tests.ledgers import agree, steps
from tests.slurm import server
from tp_invariant_recipes.runs import checkpoints

# Long enough to be caught at work, short enough to be waited for.
RUN = ("qwen3_toy", "tp=2", "seq=32", "gbs=2", "model.num_layers=1", "iters=100", "save=10", "ledger.digests=10")
SITE = """
cluster: {{gpus_per_node: 0, ranks_per_node: 2, python: {python}}}
slurm: {{time: "10"}}
"""


def cluster_file(folder: Path, python: Path | str) -> str:
    file = folder / "throwaway.yaml"
    file.write_text("# @package _global_\n" + SITE.format(python=python))
    return f"cluster={file}"


@pytest.fixture
def site(tmp_path: Path, python_on_nodes: Path) -> str:
    """The throw-away cluster as a file for `cluster=`."""
    return cluster_file(tmp_path, python_on_nodes)


@pytest.fixture
def submit(tpi, cluster, site) -> Callable[..., str]:
    """`tpi submit`; the job's id."""

    def submitted(*arguments: object) -> str:
        done = tpi("submit", *arguments, site, status=0)
        return done.stdout.strip()

    return submitted


@pytest.fixture(scope="module")
def whole(shared) -> list[bytes]:
    """The steps of the run that nothing interrupts, on one machine."""
    shared("train", *RUN, "run.dir=whole", status=0)
    return steps(shared.folder / "whole")


def attempts(run: Path) -> list[dict]:
    return json.loads((run / "run.json").read_text())["attempts"]


@pytest.mark.release  # tests/distributed has lost nodes, requeues and resumes without a cluster
def test_a_run_that_is_requeued_and_loses_a_node_has_the_ledger_of_one_that_is_not(tpi, cluster, submit, whole) -> None:
    run = tpi.folder / "run"
    job = submit(*RUN, "run.dir=run", "cluster.ranks_per_node=1")
    follower = tpi.start("logs", "-f", job)
    cluster.until(lambda: len(steps(run)) > 12, within=400)
    cluster.run("scontrol", "requeue", job)
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", within=120)
    before = len(steps(run))
    assert 12 < before < 80
    cluster.release(job)
    cluster.until(lambda: len(attempts(run)) == 2 and len(steps(run)) > before + 12, within=400)
    cluster.do("fail", "n2")
    cluster.until(lambda: cluster.job(job)["Restarts"] == "2", within=120)
    assert len(steps(run)) < 100
    cluster.release(job)
    tpi("wait", job, status=0)
    assert agree(steps(run), whole)
    assert [a["outcome"] for a in attempts(run)][2] == "completed"
    assert [a["job"]["nodes"] for a in attempts(run)] == ["n[1-2]", "n[1-2]", "n[1,3]"]
    assert all(a["from_step"] > 0 and a["from_step"] % 10 == 0 for a in attempts(run)[2:])
    assert follower.wait() == 0
    for number in range(1, 4):
        assert f"job {job}, start {number}, on n[1" in follower.stdout
    assert "step   100/100" in follower.stdout
    listed = json.loads(tpi("jobs", "run", "--json").stdout)
    assert "completed" in json.dumps(listed).lower()


@pytest.mark.release  # in `make test`: tests/distributed/commands/test_guard.py, without a cluster
def test_a_job_goes_on_without_the_node_that_computes_wrong_bits(tpi, cluster, tmp_path, whole) -> None:
    """From step 25 on every product of n2 has a wrong bit."""

    def main() -> None:
        if os.environ.get("SLURMD_NODENAME") == "n2":
            Planted("product", always=True, step=25, rank=1).plant()
        forks.main()

    run = tpi.folder / "run"
    (tmp_path / "python").mkdir()
    with server.serving(tmp_path / "python", main) as python:
        site = cluster_file(tmp_path, python)
        words = (*RUN, "run.dir=run", "cluster.ranks_per_node=1", "guard=products", "guard.products=8")
        job = tpi("submit", *words, "guard.every=5", "guard.exclude=true", site, status=0).stdout.strip()
        cluster.until(lambda: cluster.job(job)["Restarts"] == "1", within=400)
        cluster.until(lambda: cluster.job(job)["ExcNodeList"] == "n2", within=30)
        first = attempts(run)[0]
        assert (first["outcome"], first["requeued"]) == ("failed", True)
        assert "rank 1 on n2" in first["why"]
        cluster.release(job)
        tpi("wait", job, status=0)
    second = attempts(run)[1]
    assert second["job"]["nodes"] == "n[1,3]"
    assert 10 <= second["from_step"] <= int(re.search(r"silent data corruption at step (\d+)", first["why"])[1]) - 5
    assert agree(steps(run), whole)


@pytest.mark.release
def test_the_time_limit_saves_and_requeues_and_cancel_ends_it(tpi, cluster, submit) -> None:
    run = tpi.folder / "run"
    long = ("tp=1", "iters=300000", "save=0", "slurm.save_before=110")
    job = submit(*RUN, *long, "run.dir=run")
    cluster.until(lambda: len(steps(run)) > 0, within=400)
    # However long it took to begin: the limit, which SLURM counts in minutes, is now one to two minutes away.
    minutes = int(cluster.job(job)["RunTime"].split(":")[1])
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", within=400)
    first = attempts(run)[0]
    assert (first["outcome"], first["requeued"]) == ("stopped", True)
    saved = [c.step for c in checkpoints.finished(run / "checkpoints")]
    assert saved == [len(steps(run))]
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    cluster.release(job)
    cluster.until(lambda: len(steps(run)) > saved[0], within=400)
    assert attempts(run)[1]["from_step"] == saved[0]
    tpi("cancel", "run", status=0)
    waited = tpi("wait", job, status=2)
    assert f"{job} run: cancelled at step" in waited.stdout
    tpi("cancel", "run", status=0)
    cluster.until(lambda: cluster.state(job) == "CANCELLED")
    last = attempts(run)[-1]
    assert (last["outcome"], last["requeued"]) == ("stopped", False), last
    assert (run / "job.ended").read_text() == "stopped\n"


@pytest.mark.release  # in `make test`: features/verify/test_verify_matrix.py, and below SLURM takes the scripts
def test_a_matrix_is_judged_by_a_job_whose_exit_status_is_the_verdict(tpi, cluster, submit, site) -> None:
    matrix = ("qwen3_toy", "tp=1,2", "seq=32", "model.num_layers=1", "iters=20", "--verify")
    jobs = {mode: submit(*matrix, f"numerics={mode}", "--dir", mode) for mode in ("tree", "stock")}
    for mode, status in (("tree", 0), ("stock", 1)):
        tpi("wait", jobs[mode], status=status)
        verdict = json.loads((tpi.folder / mode / "verify.json").read_text())
        assert verdict["exit_status"] == status
        judge = json.loads((tpi.folder / mode / "submission.json").read_text())["jobs"][1]["id"]
        assert cluster.job(judge)["ExitCode"] == f"{status}:0"
    assert "different: tp=2 is not bitwise identical" in (tpi("jobs", "stock").stdout + verdict["text"])
    # As on another cluster, which has only the certificate.
    assert tpi("certify", "tree/tp1", "--out", "tree.tpicert").status == 0
    single = ("qwen3_toy", "tp=2", "seq=32", "model.num_layers=1", "iters=20", "--verify", "--against", "tree.tpicert")
    there = submit(*single, "numerics=tree", "--dir", "there")
    assert tpi("wait", there).status == 0
    text = json.loads((tpi.folder / "there" / "verify.json").read_text())["text"]
    assert "tp=2 is bitwise identical to tree.tpicert over 20 steps" in text


@pytest.mark.parametrize("interpreter", ("fork", pytest.param("python", marks=pytest.mark.release)))
def test_a_run_inside_an_allocation(tpi, cluster, tmp_path: Path, python_on_nodes: Path, interpreter: str) -> None:
    """With "python" the node starts the interpreter itself, as a user's does: nothing is shared with this process."""
    site = cluster_file(tmp_path, {"fork": python_on_nodes, "python": sys.executable}[interpreter])
    words = ["train", "qwen3_toy", "tp=2", "seq=32", "model.num_layers=1", "iters=5", "run.dir=run", site]
    salloc = ["salloc", "--nodes=1", sys.executable, "-m", "tp_invariant_recipes", *words, "launcher=slurm"]
    ended = subprocess.run(salloc, cwd=tpi.folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert len(steps(tpi.folder / "run")) == 5
    assert attempts(tpi.folder / "run")[0]["job"]["nodes"] == "n1"


def test_what_slurm_would_refuse_is_reported_before_anything_is_written(tpi, cluster, site) -> None:
    refused = tpi("submit", *RUN, "slurm.partition=gpu", "slurm.time=soon", "run.dir=run", site, status=2)
    for words in ("slurm.partition=gpu: there is no gpu", "cpu (default), short", "slurm.time"):
        assert words in refused.stderr
    assert not (tpi.folder / "run").exists()


EXPECTED = sorted((Path(__file__).parent / "expected").glob("*.sbatch"))


def test_slurm_takes_the_expected_scripts(cluster) -> None:
    """But for that of two nodes with eight GPUs each, which this cluster has not."""
    scripts = {script.stem: script for script in EXPECTED if script.stem != "everything"}
    assert {"train", "array", "judge"} <= {*scripts}
    for script in scripts.values():
        cluster.run("sbatch", "--test-only", script)
