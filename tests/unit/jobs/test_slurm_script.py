# SPDX-License-Identifier: Apache-2.0
"""The scripts of jobs: their text byte by byte, and what they do when bash runs them.

tests/slurm/expected holds one script of every kind. After a change that is meant, `pytest --force-regen` on this file
writes them anew: read the difference.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.jobs import submit
from tp_invariant_recipes.launch.plan import Planning

DRY = Planning(here=False, dry=True)
EXPECTED = Path(__file__).parents[2] / "slurm" / "expected"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")

# Nodes without GPUs, as scripts/slurm-cluster has them.
THROWAWAY = ("cluster.name=throwaway", "cluster.gpus_per_node=0", "cluster.ranks_per_node=4")
TWO_NODES = ("tp=8", "dp=2", "gbs=16", "numerics=tree", "save=500")
IN_PYTHON3 = ("slurm.time=4:00:00", "cluster.python=python3")
IMAGE = (
    "cluster.container=images.example#nvidia/nemo",
    "cluster.mounts=[/tmp:/data:ro,/usr:/apps/it]",
    'cluster.srun_options=["--container-writable"]',
    'slurm.setup=["module load cuda/13"]',
)

CONTAINED = ("tp=1,2", "cluster=h100", "slurm.time=5", "cluster.container=/usr", "cluster.python=python3")


def _on(cluster: str) -> tuple[str, ...]:
    """Training of qwen3_8b on two nodes of a cluster."""
    return (*TWO_NODES, f"cluster={cluster}", *IN_PYTHON3, f"run.dir=/runs/{cluster}-qwen3_8b")


# Script -> model, what follows it, of a verify its directory, and which of its scripts it is.
KINDS: dict[str, tuple[str, tuple[str, ...], str | None, int]] = {
    "train": ("qwen3_8b", _on("h100"), None, 0),
    "train-cpu": ("qwen3_toy", ("tp=2", *THROWAWAY, *IN_PYTHON3, "run.dir=/runs/cpu"), None, 0),
    "train-container": ("qwen3_8b", (*_on("h100"), *IMAGE), None, 0),
    "array": ("qwen3_toy", ("tp=1,2,8", *THROWAWAY, *IN_PYTHON3), "/runs/v", 0),
    "judge": ("qwen3_toy", ("tp=1,2,8", *THROWAWAY, *IN_PYTHON3), "/runs/v", 1),
    "hostile": (
        "qwen3_toy",
        (*THROWAWAY, "slurm.time=5", "run.dir=/runs/a b'c%d", "cluster.python=/apps/my python",
         'slurm.options=["--comment=it\'s a \\"b\\" #c","--hold"]'),
        None, 0,
    ),
    "everything": (
        "qwen3_8b",
        ("tp=8", "dp=2", "gbs=2", "cluster=h100", "cluster.gpu_type=h100", "slurm.time=2-00:00:00", "slurm.account=me",
         "slurm.partition=gpu,long", "slurm.qos=high", "slurm.save_before=300", "run.dir=/runs/a",
         "cluster.python=python3"),
        None, 0,
    ),
    "apptainer": (
        "qwen3_toy",
        ("cluster=h100", "slurm.time=5", "cluster.container=/images/a b.sif", "cluster.container_runtime=apptainer",
         "cluster.python=python3", "cluster.mounts=[/usr:/apps/it:ro]", "run.dir=/runs/a"),
        None, 0,
    ),
    "array-container": ("qwen3_toy", CONTAINED, "/runs/a b's", 0),
    "judge-container": ("qwen3_toy", CONTAINED, "/runs/a b's", 1),
}  # fmt: skip


@cache
def _scripts(model: str, overrides: tuple[str, ...], directory: str | None) -> tuple[str, ...]:
    """The scripts that `tpi submit` prints: one of a run, two of a verify."""
    if directory is None:
        result = submit.train(model, list(overrides), how=DRY)
    else:
        result = submit.several(model, list(overrides), directory=Path(directory), how=DRY)
    return tuple(script.text for script in result.scripts)


def _expected(kind: str) -> str:
    return (EXPECTED / f"{kind}.sbatch").read_text()


def test_every_kind_has_an_expected_script():
    assert sorted(file.stem for file in EXPECTED.iterdir()) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_is_the_expected_one(monkeypatch, file_regression, kind):
    monkeypatch.chdir("/")
    model, overrides, directory, number = KINDS[kind]
    text = _scripts(model, overrides, directory)[number]
    file_regression.check(text, fullpath=EXPECTED / f"{kind}.sbatch")


def _shellcheck(*texts: str) -> str:
    """What shellcheck says of these scripts; one start of it for all."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{n}.sh" for n in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        ended = subprocess.run([SHELLCHECK, "--norc", *files], text=True, capture_output=True)
    return ended.stdout + ended.stderr


def test_shellcheck_has_nothing_to_say_of_the_expected():
    assert _shellcheck(*map(_expected, KINDS)) == ""
    assert "SC2086" in _shellcheck("#!/bin/bash\nrm $1\n")


@pytest.mark.parametrize("path", ("/runs/a\nb", "/runs/a\\b"))
def test_a_directory_that_sbatch_cannot_be_told_is_refused(path):
    with pytest.raises(ConfigError):
        submit.train("qwen3_toy", [*THROWAWAY, "slurm.time=5", f"run.dir={path}"], how=DRY)


# What bash does with a script, with commands in the place of SLURM's.


@pytest.fixture
def run_script(tmp_path) -> str:
    """The script of a run in the folder `run`, which is there."""
    (tmp_path / "run").mkdir()
    (text,) = _scripts("qwen3_toy", (*THROWAWAY, "slurm.time=5", "run.dir=/runs/a"), None)
    return text.replace("/runs/a", f"{tmp_path}/run")


@pytest.fixture
def array_script(tmp_path) -> str:
    """The script of the cells tp1, tp2 and tp8 in the folder `v`, which are there."""
    for cell in ("tp1", "tp2", "tp8"):
        (tmp_path / "v" / cell).mkdir(parents=True)
    text, _ = _scripts("qwen3_toy", ("tp=1,2,8", *THROWAWAY, "slurm.time=5"), "/runs/v")
    return text.replace("/runs/v", f"{tmp_path}/v")


@pytest.fixture
def play(tmp_path):
    """Run a script as SLURM would: play(text, srun, scontrol=…, **variables).

    srun, scontrol: bash that stands for them; the words that they are given come into the file `said`, a line each.
    """
    (tmp_path / "bin").mkdir()

    def run(text: str, srun: str, scontrol: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        for name, body in (("srun", srun), ("scontrol", scontrol)):
            command = tmp_path / "bin" / name
            command.write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >>{tmp_path}/said\n{body}\n')
            command.chmod(0o755)
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1"}
        return subprocess.run(
            ["bash", "-s"], input=text, env=environment | variables, cwd=tmp_path, capture_output=True, text=True
        )

    return run


# What srun does in the run directory, what the script's exit status is then, and whether it asks to be queued again.
ENDS = (
    ("echo completed >job.ended", 0, False), ("echo completed >job.ended; exit 3", 0, False),
    ("echo requeue >job.ended; exit 1", 0, True), ("echo stopped >job.ended", 1, False),
    ("echo failed >job.ended; exit 2", 2, False), ("exit 137", 137, False), ("exit 0", 1, False),
)  # fmt: skip


@pytest.mark.parametrize("srun, status, requeued", ENDS, ids=[srun for srun, *_ in ENDS])
def test_a_job_ends_as_the_first_node_reported(run_script, play, tmp_path, srun, status, requeued):
    """The word of an earlier try does not count."""
    (tmp_path / "run" / "job.ended").write_text("requeue\n" if status == 137 else "completed\n")
    assert play(run_script, f"cd run; {srun}").returncode == status
    assert ("scontrol\nrequeue\n12\n" in (tmp_path / "said").read_text()) == requeued


def test_a_job_that_cannot_be_requeued_says_how_to_go_on(run_script, play, tmp_path):
    ended = play(run_script, "echo requeue >run/job.ended", scontrol="exit 1")
    assert ended.returncode == 1
    assert f"sbatch {tmp_path}/run/job.sbatch" in ended.stderr


def test_every_word_reaches_the_run_as_typed(play, tmp_path):
    path = f"{tmp_path}/it's $(touch {tmp_path}/evil) `b` %j"
    asked = [*THROWAWAY, "slurm.time=5", "data=text", f"data.path={path}", f"run.dir={path}"]
    play(submit.train("qwen3_toy", asked, how=DRY).scripts[0].text, "")
    output = (tmp_path / "said").read_text().splitlines()
    words = ["train", "qwen3_toy", *asked[:-1], "device=cpu", asked[-1], "launcher=slurm", "--continue"]
    assert output[output.index("train") :] == words
    assert not (tmp_path / "evil").exists()


# A line of slurm.setup, and what the script says then.
ENDING = (
    ("false", "slurm.setup: false\n"), ("exit 0", "slurm.setup has ended the job\n"),
    ("echo 'open", "slurm.setup: echo 'open\n"), ("if true; then", "slurm.setup: if true; then\n"),
    ("no_such_command a", "slurm.setup: no_such_command a\n"),
)  # fmt: skip


def _set_up(*lines: str) -> str:
    listed = ",".join(f'"{line}"' for line in lines)
    (text,) = _scripts("qwen3_toy", (*THROWAWAY, "slurm.time=5", "run.dir=/runs/a", f"slurm.setup=[{listed}]"), None)
    return text


def test_a_line_of_setup_that_fails_ends_the_job_before_it_trains(play, tmp_path):
    texts = [_set_up("true", line) for line, _ in ENDING]
    assert _shellcheck(*texts) == ""
    for text, (_, says) in zip(texts, ENDING, strict=True):
        ended = play(text, "")
        assert ended.returncode == 2
        assert says in ended.stderr
        assert not (tmp_path / "said").exists()


def test_setup_is_there_for_srun(play, tmp_path):
    text = _set_up("export ASKED='a  b'", "unset NO_SUCH; test -z $NO_SUCH").replace("/runs/a", f"{tmp_path}/run")
    (tmp_path / "run").mkdir()
    assert play(text, f'echo "$ASKED" >{tmp_path}/asked; echo completed >run/job.ended').returncode == 0
    assert (tmp_path / "asked").read_text() == "a  b\n"


def test_a_job_that_waits_for_others_says_so_to_sbatch_and_not_in_its_script():
    asked = [*THROWAWAY, "slurm.time=5", "run.dir=/runs/a"]
    result = submit.train("qwen3_toy", asked, after=["12", "13"], how=DRY)
    assert result.commands() == [
        "sbatch --parsable --kill-on-invalid-dep=yes --dependency=afterok:12:13 /runs/a/job.sbatch"
    ]
    assert result.scripts[0].text == submit.train("qwen3_toy", asked, how=DRY).scripts[0].text
    with pytest.raises(RunError, match="no job nothing"):
        submit.train("qwen3_toy", asked, after=["nothing"], how=DRY)


def test_a_dry_run_as_json_has_the_plan_and_the_scripts(cli, monkeypatch):
    monkeypatch.chdir("/")
    away = ("cluster.container=/lustre9/a.sqsh", "cluster.python=python3")
    ended = cli("submit", "qwen3_8b", *_on("h100"), *away, "--dry-run", "--json")
    result = json.loads(ended.out)
    assert (ended.status, result["kind"], result["nodes"], result["ranks_per_node"]) == (0, "train", 2, 8)
    assert result["directory"] == "/runs/h100-qwen3_8b"
    image = "cluster.container=/lustre9/a.sqsh"
    assert result["unseen"] == [f"{image}: /lustre9/a.sqsh is not on this host; the nodes must have it"]
    (job,) = result["jobs"]
    plain = cli("submit", "qwen3_8b", *_on("h100"), *away, "--dry-run")
    assert job["script"] == plain.out
    assert cli("submit", "qwen3_8b", *_on("h100"), "--dry-run").out == _expected("train")
    assert f"would run: {job['command']}\n" in plain.err
    assert "not checked: cluster.container=/lustre9/a.sqsh" in plain.err


def test_a_dry_run_of_a_matrix_writes_nothing_and_names_what_is_omitted(cli, monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("a.txt").write_text("words " * 100)
    text = ("data=text", "data.path=a.txt", "data.tokenizer=byte")
    before = sorted(tmp_path.rglob("*"))
    asked = ("qwen3_toy", "tp=1,2", "sp=true,false", *THROWAWAY, *text, "slurm.time=5", "--verify", "--dry-run")
    ended = cli("submit", *asked)
    assert ended.status == 0, ended.err
    assert "left out: tp=1 sp=true: sp=true needs tp > 1" in ended.err
    assert "#SBATCH --array=0-2" in ended.out
    assert sorted(tmp_path.rglob("*")) == before


def _task(number: int) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": str(number)}


def test_each_task_of_an_array_trains_its_own_cell(array_script, play, tmp_path):
    assert play(array_script, "echo completed >v/tp8/job.ended", **_task(2)).returncode == 0
    output = (tmp_path / "said").read_text().splitlines()
    assert {"--nodes=2", "tp=8", f"run.dir={tmp_path}/v/tp8"} <= set(output)
    assert {"tp=1", "tp=2"} & set(output) == set()


def test_a_task_of_an_array_is_requeued_alone(array_script, play, tmp_path):
    assert play(array_script, "echo requeue >v/tp1/job.ended", **_task(0)).returncode == 0
    assert "scontrol\nrequeue\n11_0\n" in (tmp_path / "said").read_text()
    ended = play(array_script, "echo requeue >v/tp1/job.ended", scontrol="exit 1", **_task(0))
    assert ended.returncode == 1
    assert f"sbatch --array=0 {tmp_path}/v/job.sbatch" in ended.stderr


def test_a_task_that_is_no_cell_is_an_error(array_script, play):
    ended = play(array_script, "", **_task(3))
    assert (ended.returncode, ended.stderr) == (2, "there is no cell 3\n")
