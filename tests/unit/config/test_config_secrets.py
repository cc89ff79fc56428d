# SPDX-License-Identifier: Apache-2.0
"""An interpolation cannot put a variable, a file or the clock into what a run writes: it is refused by its key."""

import pytest

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.config.compose import compose

SECRET = "hunter2-b0a1"
FILE = "secret.txt"

# Key and what it is set to.
LEAKS = (
    ("run.dir", "${oc.env:TPI_TEST_SECRET}"), ("run.dir", "${ oc.env : TPI_TEST_SECRET }"),
    ("run.dir", "runs/${oc.env:TPI_TEST_SECRET,none}/a"), ("data.json_key", "'${oc.env:TPI_TEST_SECRET}'"),
    ("data.json_key", "'${oc.decode:${oc.env:TPI_TEST_SECRET}}'"),
    ("cluster.environment.TOKEN", "${oc.env:TPI_TEST_SECRET}"),
    ("cluster.mounts", "['${oc.env:TPI_TEST_SECRET}:/a']"),
    ("slurm.options", "['--comment=${oc.env:TPI_TEST_SECRET}']"),
    ("logger.wandb_project", "${oc.env:TPI_TEST_SECRET}"), ("run.dir", "${hydra:runtime.cwd}"),
    ("run.dir", "${now:%Y}"), ("run.dir", "${oc.select:data.json_key}"), ("run.dir", "${unknown:a}"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _secret(monkeypatch, tmp_path):
    monkeypatch.setenv("TPI_TEST_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()


def safe_problems(*overrides: str) -> list[str]:
    problems = problems_of(*overrides)
    assert SECRET not in "".join(problems)
    return problems


@pytest.mark.parametrize("key, value", LEAKS)
def test_an_override_is_refused_by_its_key(key, value):
    problems = safe_problems(f"{key}={value}")
    assert all(problem.startswith(key) for problem in problems)
    assert "is not resolved" in problems[0]
    assert "cluster.forward=[NAME]" in problems[0]


def test_a_name_joined_calls_no_other_resolver():
    (problem,) = safe_problems("data.json_key=oc.env", "run.dir=${${data.json_key}:TPI_TEST_SECRET}")
    assert problem.startswith("run.dir: ")
    assert "cluster.forward" in problem


def test_a_choice_of_a_group_is_not_resolved():
    (problem,) = safe_problems("numerics=${oc.env:TPI_TEST_SECRET}")
    assert problem.startswith("numerics=${oc.env:TPI_TEST_SECRET}: unknown numerics")


@pytest.mark.parametrize("base", ("local", "${oc.env:TPI_TEST_SECRET}"))
def test_a_file_of_a_cluster_is_refused(tmp_path, base):
    fields = "cluster:\n  environment:\n    TOKEN: ${oc.env:TPI_TEST_SECRET}\n"
    (tmp_path / "site.yaml").write_text(f"# @package _global_\ndefaults:\n  - {base}\n{fields}")
    (problem, *_) = safe_problems(f"cluster={tmp_path}/site.yaml")
    assert base != "local" or problem.startswith("cluster.environment.TOKEN: ${oc.env:…} is not resolved")


def test_a_users_own_file_is_refused(tmp_path):
    own = tmp_path / "config" / "tpi" / "data"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("kind: mock\njson_key: ${oc.env:TPI_TEST_SECRET}\n")
    (problem,) = safe_problems("data=mine")
    assert problem.startswith("data.json_key: ${oc.env:…} is not resolved")


COMMANDS = (
    "show qwen3_toy {}", "show qwen3_toy {} --json", "train qwen3_toy {}",
    "submit qwen3_toy {} slurm.time=5 device=cpu cluster.gpus_per_node=0 cluster.ranks_per_node=4",
    "train qwen3_toy run.dir={value}",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_or_writes_it(cli, tmp_path, command):
    value = "${oc.env:TPI_TEST_SECRET}"
    words = [w.format(f"data.json_key={value}", value=value) if "{" in w else w for w in command.split()]
    ended = cli(*words)
    assert ended.status == 2
    assert "is not resolved" in ended.err
    assert SECRET not in ended.out + ended.err
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f.suffix != ".pyc"]  # of packages imported first


def test_references_to_other_keys_and_our_own_functions_are_resolved():
    tree = compose("qwen3_toy", ["slurm.account=${cluster.name}", "tp=2"], device="cpu").config.sections
    assert tree["slurm"]["account"] == "local"
    assert tree["model"]["sequence_parallel"] is True
