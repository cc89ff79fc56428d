# SPDX-License-Identifier: Apache-2.0
"""`tpi submit`: what is checked, what is written, what SLURM is handed, and what is left after a mistake.

SLURM's commands are small programs on PATH; tests/slurm does the same on a real cluster.
"""

import json
import os
from pathlib import Path

import pytest

from tests.commands_on_path import CommandsOnPath
from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.jobs.slurm_client import Partition
from tp_invariant_recipes.jobs.submit import unfit
from tp_invariant_recipes.runs.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("bridge", "no_gpus")

NODES = ("cluster.name=site", "cluster.gpus_per_node=0", "cluster.ranks_per_node=4")
RUN = ("qwen3_toy", *NODES, "slurm.time=5")
LAYOUT = ("tp=4", "ep=8", "dp=2", "gbs=2")
ON_GPUS = ("qwen3_30b_a3b", *LAYOUT, "cluster=h100", "slurm.time=5", "device.check_memory=false")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """The current directory, empty; and a registry of jobs of one's own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> CommandsOnPath:
    """SLURM of two partitions. sbatch gives ids from 12 on."""
    commands = CommandsOnPath(tmp_path / "bin", monkeypatch)
    commands.put("sinfo", "printf '%s\\n' 'a notice' 'tpi|cpu*|0/3/0/3|1-00:00:00' 'tpi|short|0/3/0/3|1:00'")
    commands.put("sbatch", f"echo a notice; echo $((11 + $(wc -l <{commands.folder}/sbatch.said)))")
    commands.put("scancel")
    return commands


def _registered(tmp_path: Path) -> list[dict]:
    file = tmp_path / "state" / "tpi" / "jobs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


def test_a_run_is_written_and_submitted(cli, slurm, here, tmp_path):
    ended = cli("submit", *RUN, "tp=2", "iters=7", "run.dir=a b")
    assert (ended.status, ended.out) == (0, "12\n")
    assert "tpi logs -f 12" in ended.err
    where = RunDir(here / "a b")
    assert slurm.calls("sbatch") == [f"--parsable {where.script}"]
    assert _registered(tmp_path) == [{"job": "12", "directory": str(where.path)}]
    run = where.read_run()
    assert (run["model"], run["device"], run["attempts"]) == ("qwen3_toy", "cpu", [])
    given = [*RUN[1:], "tp=2", "iters=7", "device=cpu", f"run.dir={where.path}", "launcher=slurm"]
    assert run["overrides"] == given
    assert where.read_config()["run"]["dir"] == str(where.path)
    assert where.logs.is_dir()
    submission = json.loads(where.submission.read_text())
    assert submission.pop("time")
    assert submission == {
        "schema": 1, "kind": "train", "model": "qwen3_toy",
        "command": f"tpi submit {' '.join(RUN)} tp=2 iters=7 'run.dir=a b'", "directory": str(where.path),
        "jobs": [{"id": "12", "role": "train"}],
    }  # fmt: skip


def test_a_login_node_needs_no_transformer_engine(cli, slurm, here):
    before = dict(os.environ)
    more = ("precision=fp8_tensorwise", "cuda_graph=te", "numerics=stock")
    ended = cli("submit", *ON_GPUS, *more, "run.dir=a")
    assert (ended.status, ended.out) == (0, "12\n"), ended.err
    assert RunDir(here / "a").read_config()["model"]["moe_permute_fusion"] is True
    assert os.environ == before  # sbatch gives the job what there is


def test_where_bridge_cannot_be_imported_the_nodes_ask_it(cli, slurm, monkeypatch):
    def load(*_):
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(container, "build", load)
    ended = cli("submit", *RUN, "run.dir=a")
    assert (ended.status, ended.out) == (0, "12\n")
    assert "the nodes will ask Megatron-Bridge, which fails here: OSError: libcuda.so.1: no such file" in ended.err


# Arguments, and what must stand in the message.
MISTAKES = (
    (["qwen3_toy", "slurm.time=5"], ["cluster=local does not say how many ranks a node takes"]),
    ([*RUN, "launcher=slurm", "tp=3", "lr=x"], ["problems", "launcher=slurm: ", "tp=3 does", "lr=x: "]),
    (
        ["qwen3_toy", *NODES, "slurm.time=x", "slurm.partition=cpuu"],
        ["2 problems", "slurm.time=x: ", "slurm.partition=cpuu: there is no cpuu; did you mean 'cpu'?"],
    ),
    (
        [*RUN, "tp=8", "dp=2", "gbs=2", "slurm.partition=short"],
        ["slurm.time=5: partition short allows", "4 nodes with 4 cpu ranks each are needed, and partition short"],
    ),
    ([*RUN, "run.dir=taken"], ["run.dir=taken is not empty"]),
    ([*RUN, "data=text", "data.path=no/such"], ["no/such: "]),
    ([*RUN, "model.recompute_granularity=full"], ["Megatron-Bridge refuses this configuration: ", "recompute_method"]),
    ([*RUN, "tp=1,2", "dataset.seq_length=64", "--verify"], ["Megatron-Bridge refuses this configuration: ", "64"]),
    ([*RUN, "--against", "x"], ["--against belongs to --verify"]),
    ([*RUN, "tp=1,2"], ["one run takes one value for tp"]),
    ([*RUN, "tp=1,2", "slurm.tries=5,6", "--verify"], ["slurm.tries=5, 6: the configurations are one array"]),
    ([*RUN, "tp=1,2", "run.dir=x", "--verify"], ["--dir PATH"]),
)


@pytest.mark.parametrize("arguments, says", MISTAKES, ids=[" ".join(a[-3:]) for a, _ in MISTAKES])
def test_a_mistake_is_one_message_and_leaves_nothing(cli, slurm, here, tmp_path, arguments, says):
    (here / "taken").mkdir()
    (here / "taken" / "file").touch()
    ended = cli("submit", *arguments)
    assert (ended.status, ended.out) == (2, "")
    for part in says:
        assert part in ended.err
    assert sorted(p.name for p in here.rglob("*")) == ["file", "taken"]
    assert [*slurm.calls("sbatch"), *_registered(tmp_path)] == []


def test_where_slurm_is_not_that_is_reported_beside_what_else_is_wrong(cli, here, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = cli("submit", *RUN[:-1])
    assert ended.status == 2
    for part in ("2 problems", "slurm.time is not set", "SLURM is not installed here: sinfo is not on PATH"):
        assert part in ended.err
    assert list(here.iterdir()) == []


def _files(where: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in where.iterdir() if file.is_file() and file.name != "write.lock"}


def test_a_run_goes_on_in_a_job(cli, slurm, here, tmp_path):
    assert cli("submit", *RUN, "dp=2", "gbs=2", "iters=7", "guard=products", "run.dir=a").status == 0
    where = RunDir(here / "a")
    before = _files(where.path)
    ended = cli("submit", "--resume", "a", "slurm.time=9", "dp=1", "--after", "12")
    assert (ended.status, ended.out) == (0, "13\n"), ended.err
    assert "waits until job 12 has ended well" in ended.err
    assert slurm.calls("sbatch")[1] == f"--parsable --kill-on-invalid-dep=yes --dependency=afterok:12 {where.script}"
    words = where.script.read_text().split(" train qwen3_toy \\\n")[1].split(" launcher=slurm --continue")[0]
    kept = [word for word in RUN[1:] if not word.startswith("slurm.time=")]
    counts = ["numerics.data_shards=2", "numerics.context_shards=1"]  # another layout has other defaults
    given = [*kept, "gbs=2", "iters=7", "guard=products", "device=cpu", *counts, "slurm.time=9", "dp=1"]
    assert [word.strip() for word in words.split(" \\\n")] == ["numerics=tree", *given, 'run.dir="$run"']
    assert {name for name, data in _files(where.path).items() if data != before.get(name)} == {
        "job.sbatch",
        "submission.json",
    }
    assert _registered(tmp_path)[-1] == {"job": "13", "directory": str(where.path)}


def test_a_completed_run_needs_no_job(cli, slurm, here, monkeypatch):
    assert cli("submit", *RUN, "tp=2", "iters=7", "run.dir=a").status == 0
    submitted, before = slurm.calls("sbatch"), _files(here / "a")
    monkeypatch.setattr("tp_invariant_recipes.launch.resume.completed_steps", lambda run_dir: 7)
    for options in ((), ("--dry-run",), ("--json",)):
        ended = cli("submit", "--resume", "a", *options)
        assert ended.status == 0
        assert "completed at step 7 of 7: no step is left to train. iters=N goes on at step 0: tpi train" in ended.err
    assert (slurm.calls("sbatch"), _files(here / "a")) == (submitted, before)


def test_where_a_job_cannot_go_on_with_a_run_it_stays_as_it_was(cli, slurm, here):
    assert cli("submit", *RUN, "run.dir=a").status == 0
    before = _files(here / "a")
    slurm.put("sbatch", "echo 'sbatch: error: Invalid qos specification' >&2; exit 1")
    refused = {
        "Invalid qos": cli("submit", "--resume", "a", "slurm.time=9"),
        "rng.seed was 1234 and is 7 now": cli("submit", "--resume", "a", "seed=7"),
        "run.dir=b: the job goes on in": cli("submit", "--resume", "a", "run.dir=b"),
        "checkpoint.ckpt_step=3: each start": cli("submit", "--resume", "a", "checkpoint.ckpt_step=3"),
        "--resume and --verify are different kinds": cli("submit", "--resume", "a", "--verify"),
        "none is not a run directory": cli("submit", "--resume", "none"),
    }
    slurm.put("squeue", "echo 'tpi|12|N/A|RUNNING|9:00|n1|None'")
    refused["tpi cancel 12"] = cli("submit", "--resume", "a")
    assert [(item.status, item.out) for item in refused.values()] == [(2, "")] * len(refused)
    assert [text for text, item in refused.items() if text not in item.err] == []
    assert _files(here / "a") == before


def test_a_submission_that_slurm_refuses_can_be_repeated(cli, slurm, here, tmp_path):
    (here / "a").mkdir()
    slurm.put("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1")
    ended = cli("submit", *RUN, "run.dir=a")
    assert (ended.status, ended.out) == (2, "")
    assert "Invalid qos specification\nslurm.qos=NAME" in ended.err
    assert [str(p.relative_to(here)) for p in here.rglob("*")] == ["a"]
    assert _registered(tmp_path) == []


def test_a_matrix_is_an_array_and_a_judge_that_waits_for_it(cli, slurm, here, tmp_path):
    ended = cli("submit", *RUN, "tp=1,8", "--verify", "--dir", "v")
    assert (ended.status, ended.out) == (0, "12\n")
    assert "job 13 compares when all have ended" in ended.err
    path = here / "v"
    assert slurm.calls("sbatch") == [
        f"--parsable {path}/job.sbatch",
        f"--parsable --kill-on-invalid-dep=yes --dependency=afterany:12 {path}/judge.sbatch",
    ]
    assert _registered(tmp_path) == [{"job": job, "directory": str(path)} for job in ("12", "13")]
    submission = json.loads((path / "submission.json").read_text())
    assert submission["kind"] == "verify"
    assert submission["jobs"] == [{"id": "12", "role": "cells"}, {"id": "13", "role": "judge"}]
    assert submission["cells"] == ["tp1", "tp8"]
    cells = json.loads((path / "matrix.json").read_text())["cells"]
    assert [(cell["name"], cell["ranks"]) for cell in cells] == [("tp1", 1), ("tp8", 8)]
    assert [RunDir(path / name).read_run()["attempts"] for name in submission["cells"]] == [[], []]


def test_without_its_judge_an_array_does_not_remain(cli, slurm, here):
    slurm.put("sbatch", "if [[ $* == *judge.sbatch ]]; then echo 'sbatch: error: no' >&2; exit 1; fi; echo 12")
    ended = cli("submit", *RUN, "tp=1,2", "--verify", "--dir", "v")
    assert (ended.status, ended.out) == (2, "")
    assert slurm.calls("scancel") == ["12"]
    assert list(here.iterdir()) == []


def test_an_array_that_cannot_be_ended_is_named(cli, slurm, here):
    slurm.put("sbatch", "if [[ $* == *judge.sbatch ]]; then echo 'sbatch: error: no' >&2; exit 1; fi; echo 12")
    slurm.put("scancel", "echo 'scancel: error: not now' >&2; exit 1")
    ended = cli("submit", *RUN, "tp=1,2", "--verify", "--dir", "v")
    assert "sbatch: no\nand job 12, submitted before it, could not be ended: scancel: not now" in ended.err
    assert (here / "v" / "job.sbatch").exists()


def test_a_job_that_cannot_be_noted_is_named(cli, slurm, tmp_path):
    (tmp_path / "state").write_text("a file, and no folder")
    ended = cli("submit", *RUN, "run.dir=a")
    assert (ended.status, ended.out) == (2, "")
    assert "job 12 is submitted, but tpi jobs may not find it: cannot write" in ended.err


# The partitions a job may wait in, and what is wrong: settings of slurm.*, partitions, parts of the problems.
CPU, LONG = Partition("cpu", False, 1, 60), Partition("long", False, 2, None)
PLACES: tuple[tuple[dict, tuple[Partition, ...], tuple[str, ...]], ...] = (
    ({"time": "2"}, (CPU, LONG), ("no default partition; set slurm.partition to one of: cpu, long",)),
    ({"time": "2", "partition": "cpu"}, (CPU, LONG), ("partition cpu allows 0:01:00", "partition cpu has 1")),
    ({"time": "2", "partition": "cpu,long"}, (CPU, LONG), ()),
    ({"time": "1", "partition": "cpu"}, (Partition("cpu", True, 2, 60),), ()),
)


def test_what_would_wait_for_ever_is_refused(monkeypatch):
    config = compose("qwen3_toy", [*NODES, "tp=8"]).config  # two nodes
    for settings, there, says in PLACES:
        results = unfit(config.with_fields("slurm", **settings), there)
        assert len(results) == len(says), settings
        for problem, part in zip(results, says, strict=True):
            assert part in problem
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    assert unfit(config.with_fields("slurm", time="2"), (CPU, LONG)) == []
