# SPDX-License-Identifier: Apache-2.0
"""How many nodes a run takes, and why a job of it is not submitted."""

import copy
import platform
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.check.hosts import job as job_rules
from tp_invariant_recipes.check.hosts.job import STEPPED, SUBMITTED, WRITTEN, PendingJob, check_job, misfits, parse_time
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import lines
from tp_invariant_recipes.settings import run_config
from tp_invariant_recipes.settings.run_config import Allocation, RunConfig

GOOD = {"cluster.gpus_per_node": 8, "slurm.time": "4:00:00"}


@cache
def _composed(device: str):
    return compose("qwen3_toy", device=device).config.sections


def job(tp: int = 1, dp: int = 1, *, device: str = "gpu", **fields) -> RunConfig:
    """A run with these values at these places: `cluster__ranks_per_node=4`."""
    tree = copy.deepcopy(_composed(device))
    places = GOOD | {name.replace("__", "."): value for name, value in fields.items()}
    tree["model"]["tensor_model_parallel_size"] = tp
    tree["parallel"]["data_parallel_size"] = dp
    for path, value in places.items():
        section, name = path.split(".")
        assert name in tree[section], path
        tree[section][name] = value
    return RunConfig(tree)


def job_problems(*arguments, environ=None, **fields) -> list[str]:
    return [str(problem) for problem in check_job(PendingJob(job(*arguments, **fields), environ or {}))]


# tp, dp, fields, what is taken.
TAKEN = (
    (1, 1, {}, Allocation(1, 1, 1)), (2, 3, {}, Allocation(1, 6, 6)), (8, 1, {}, Allocation(1, 8, 8)),
    (8, 2, {}, Allocation(2, 8, 8)), (2, 2, {"cluster__ranks_per_node": 2}, Allocation(2, 2, 2)),
    (4, 4, {"device": "cpu", "cluster__gpus_per_node": 0, "cluster__ranks_per_node": 4}, Allocation(4, 4, 0)),
)  # fmt: skip


@pytest.mark.parametrize("tp, dp, fields, taken", TAKEN)
def test_what_a_run_takes(tp, dp, fields, taken):
    assert run_config.allocation_of(job(tp, dp, **fields)) == taken
    assert job_problems(tp, dp, **fields) == []


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16))
def test_a_run_without_problems_has_a_place_for_each_rank_and_no_other(tp, dp, most):
    tree = job(tp, dp, cluster__gpus_per_node=most)
    taken = run_config.allocation_of(tree)
    if not misfits(tree):
        assert taken.nodes * taken.ranks == tp * dp
        assert taken.ranks <= most
        assert taken.nodes == 1 or taken.ranks == most
    else:
        assert tp * dp > most
        assert tp * dp % most


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16))
def test_the_nearest_layouts_that_are_named_fit_and_none_between_does(tp, dp, most):
    result = lines(misfits(job(tp, dp, cluster__gpus_per_node=most)))
    if not result:
        return
    (problem,) = result
    named = [int(part.split(" ")[0]) for part in problem.split("the nearest that do: ")[1].split("dp=")[1:]]
    assert max(named) > dp
    for other in range(min([*named, dp]), max(named) + 1):
        assert (misfits(job(tp, other, cluster__gpus_per_node=most)) == []) == (other in named)


# The rule that refuses -> fields of a job of one rank. On a node, these still hold.
MISFITS = {
    "no_gpu_memory": ({"cluster__gpu_memory": 0},),
    "more_ranks_than_gpus": ({"cluster__ranks_per_node": 9},),
    "srun_options": (
        {"cluster__srun_options": ['-w n1']}, {"cluster__srun_options": ['--mpi=a\nb']},
        {"cluster__srun_options": ['--nod=3']}, {"cluster__srun_options": ['--export=NONE']},
        {"cluster__srun_options": ['--container-writable'], "cluster__container_runtime": 'apptainer'},
    ),
}  # fmt: skip
# And these are of the machine that submits, and of what sbatch is asked.
SUBMITTING = {
    "other_processors": ({"cluster__architecture": {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]},),
    "unknown_nodes": ({"cluster__gpus_per_node": None},),
    "other_device": (
        {"device": 'cpu', "cluster__name": 'h100'}, {"cluster__gpus_per_node": 0, "cluster__ranks_per_node": 8},
    ),
    "time": (
        {"slurm__time": None}, {"slurm__time": 'soon'}, {"slurm__time": '2'},
        {"slurm__time": '0:50', "slurm__save_before": 51},
    ),
    "words": (
        {"slurm__account": 'a b'}, {"slurm__partition": '$(rm)'}, {"slurm__qos": ''}, {"slurm__qos": 'a\n'},
        {"cluster__gpu_type": 'h100;'},
    ),
    "options": (
        {"slurm__options": ['-p gpu']}, {"slurm__options": ['reservation=x']}, {"slurm__options": ['--']},
        {"slurm__options": ['--comment=a\nb']}, {"slurm__options": ['--partition=x']},
        {"slurm__options": ['--part x']}, {"slurm__options": ['--time-min=5']},
    ),
    "container": (
        {"cluster__mounts": ['/:/a']}, {"cluster__container": 'ngc#x'},
        {"cluster__container": '~/a.sqsh', "cluster__python": 'p'},
        {"cluster__container": '/a/b.sif', "cluster__python": 'p'},
        {"cluster__container": '-x', "cluster__python": 'p'},
        {"cluster__container": 'nemo', "cluster__python": 'p', "cluster__container_runtime": 'apptainer'},
    ),
    "absent": (
        {"cluster__container": '/usr/such.sqsh', "cluster__python": 'p'},
        {"cluster__container": 'a', "cluster__python": 'p', "cluster__mounts": ['/usr/no:/a']},
    ),
    "mounts": ({"cluster__container": 'a', "cluster__python": 'p', "cluster__mounts": ['/a']},),
    "setup": ({"slurm__setup": ['module load a\nrm x']}, {"slurm__setup": [' ']},),
    "python": ({"cluster__python": '~/venv/bin/python'},),
    "forwarded": ({"cluster__forward": ['A=b']}, {"cluster__forward": ['NOT_SET']},),
}  # fmt: skip
REFUSED = [(rule, fields) for table in (MISFITS, SUBMITTING) for rule, rows in table.items() for fields in rows]


@pytest.mark.parametrize("rule, fields", REFUSED, ids=str)
def test_what_keeps_a_job_from_being_submitted(rule, fields):
    (problem,) = check_job(PendingJob(job(**fields), {}))
    assert problem.rule == rule
    assert rule in ("unknown_nodes", "other_device") or any(name.replace("__", ".") in str(problem) for name in fields)
    assert misfits(job(**fields)) == ([problem] if rule in MISFITS and fields in MISFITS[rule] else [])


def test_every_rule_of_submitting_is_in_the_table():
    for rule in SUBMITTED:
        assert any(rule.problems(PendingJob(job(**fields), {})) for rows in SUBMITTING.values() for fields in rows)


# The same without the mistake.
VALID = (
    {"slurm__time": "2:01"},
    {"cluster__ranks_per_node": 8},
    {"slurm__account": "proj-1.a_b@site", "slurm__partition": "h100,h200"},
    {"slurm__qos": "high+", "cluster__gpu_type": "h100"},
    {"slurm__options": ["--reservation=x", "--comment=a b c", "--mem=0", "--nodelist=n[1-4]", "--hold"]},
    {"cluster__python": "python3"},
    {"cluster__python": "/no/venv/bin/python"},
    {"cluster__container": "docker://images.example#nvidia/nemo:25.09", "cluster__python": "python3"},
    {"cluster__container": "/no/such.sqsh", "cluster__python": "python3", "cluster__mounts": ["/scratch9:/a"]},
    {"cluster__container": "/a/b.sif", "cluster__python": "python3", "cluster__container_runtime": "apptainer"},
    {"cluster__container": "docker://a", "cluster__python": "python3", "cluster__container_runtime": "apptainer"},
    {"cluster__srun_options": ["--mpi=pmix", "--container-writable", "--nodelist=n1"]},
    {"slurm__setup": ["module load cuda/13", "export A='b c'; source x"]},
    {"checkpoint__save_interval": 5},
)  # fmt: skip


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_a_job_that_can_be_submitted(fields):
    assert job_problems(**fields) == []


@pytest.mark.parametrize("name", ("WANDB_API_KEY", "HF_TOKEN"))
def test_what_is_forwarded_must_be_set_and_is_not_shown(name):
    assert job_problems(cluster__forward=[name], environ={name: "hunter2"}) == []
    assert len(job_problems(cluster__forward=[name])) == 1


def test_mounts(tmp_path: Path):
    image = {"cluster__container": "image", "cluster__python": "python3"}

    def mounted(*mounts: str) -> list[str]:
        return job_problems(**image, cluster__mounts=list(mounts))

    assert mounted(f"{tmp_path}:/data", f"{tmp_path}:{tmp_path}:ro", f"{tmp_path}:/x:x-create=dir+rw") == []
    wrong = ("/a", "a:/b", f"{tmp_path}:b", f"{tmp_path}:/a,/b:/c", f"{tmp_path}:/a b", "$HOME:/b", "~:/b", ":/a", "")
    for problem, mount in zip(mounted(*wrong), wrong, strict=True):
        assert problem.startswith(f"cluster.mounts: {mount!r} is not SOURCE:TARGET")
    assert mounted(f"{tmp_path}/no:/a") == [
        f"cluster.mounts: {tmp_path}/no:/a: {tmp_path}/no does not exist, and this host has {tmp_path}"
    ]


def test_what_this_host_lacks_is_given_to_the_nodes_and_named():
    there = {"cluster__container": "/lustre9/a.sqsh", "cluster__python": "p", "cluster__mounts": ["/usr/no:/a"]}
    (refused,) = job_problems(**there)
    assert refused.startswith("cluster.mounts: /usr/no:/a: ")
    assert check_job(PendingJob(job(**there), {}, dry=True)) == []
    assert lines(job_rules.unseen(job(**there))) == [
        "cluster.container=/lustre9/a.sqsh: /lustre9/a.sqsh is not on this host; the nodes must have it",
        "cluster.mounts: /usr/no:/a: /usr/no is not on this host; the nodes must have it",
    ]


@pytest.mark.parametrize(
    "key, what, names", (("slurm.options", "job", WRITTEN), ("cluster.srun_options", "step", STEPPED))
)
def test_what_the_job_or_its_step_says_itself_is_no_option(key, what, names):
    for name, instead in names.items():
        (problem,) = job_problems(**{key.replace(".", "__"): [f"{name}=1"]})
        assert problem == f"{key}: {name}=1: the {what} says {name} itself; {instead}"


@pytest.mark.parametrize(
    "text",
    (
        *("", " 30", "30 ", "30\n", "-1", "1-", "-1:00", "1:", ":30", "1:2:3:4", "1-2:3:4:5", "1:-2", "1--2", "1-2-3"),
        *("4h", "1.5", "+5", "٣", "INFINITE"),
    ),
)
def test_what_is_no_time_limit(text):
    with pytest.raises(ValueError, match="is no time limit: minutes, or as in 30:00, 4:00:00, 2-12 or 2-12:00:00"):
        parse_time(text)


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_every_way_to_write_a_time_limit_means_the_same(days, hours, minutes, seconds):
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert parse_time(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == whole
    assert parse_time(f"{days * 24 + hours}:{minutes:02}:{seconds:02}") == whole
    assert parse_time(f"{whole // 60}:{seconds}") == whole
    assert parse_time(f"{days}-{hours}:{minutes}") == whole - seconds
    assert parse_time(str(whole // 60)) == whole - seconds
    assert parse_time(f"{days}-{hours}") == whole - seconds - 60 * minutes
