# SPDX-License-Identifier: Apache-2.0
"""`tpi jobs`, and `tpi cancel`."""

import json
import os

import pytest

from tests.unit.jobs.fake_slurm import age, now, row


def test_the_table_of_a_verify(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    slurm.scene(row("12_1", "RUNNING", remaining="1-02:03:04"), row("13", "PENDING", "Dependency"))
    now(made.attempt("tp1", outcome="completed"))
    now(made.steps(20, "tp1"))
    now(made.attempt("tp2", job={"id": "14", "restart": 2, "nodes": "n2"}))
    now(made.steps(7, "tp2", torn='{"step": 8, "lo'))
    ended = cli("jobs")
    assert (ended.status, ended.err) == (0, "")
    lines = [" ".join(line.split()) for line in ended.out.splitlines() if line.strip()]
    assert lines[0] == "job run state step loss time left"
    assert lines[1:] == [
        "12_0 v/tp1 completed 20 of 20 3.0000",
        "12_1 v/tp2 running start 3 7 of 20 4.3000 1-02:03:04",
        "13 v (judge) pending (Dependency)",
    ]


def test_without_names_the_queue_and_the_last_day_are_listed(cli, slurm, submitted):
    for number, name in enumerate(("queued", "recent", "old", "gone", "gone-queued")):
        made = submitted(name, str(10 + number))
        if name in ("queued", "old"):
            age(made.directory)
        if name.startswith("gone"):
            os.rename(made.directory, made.directory.with_name(f"x{number}"))
    slurm.scene(row("10", "PENDING"), row("14", "RUNNING"), row("99", "RUNNING"))
    names = [job["run"] for job in json.loads(cli("jobs", "--json").out)["jobs"]]
    assert names == ["queued", "recent"]
    assert "--me" in slurm.calls("squeue")[0]
    names = [job["run"] for job in json.loads(cli("jobs", "--all", "--json").out)["jobs"]]
    assert names == ["queued", "recent", "old"]


@pytest.mark.parametrize("names", ((), ("a", "b")), ids=("listed", "named"))
def test_without_the_controller_run_directories_speak(cli, slurm, submitted, names):
    now(submitted("a").attempt(outcome="completed"))
    now(submitted("b", "14").attempt(job={"id": "14", "restart": 0, "nodes": "n1"}))
    slurm.scene(away=True)
    ended = cli("jobs", *names, "--json")
    report = json.loads(ended.out)
    assert "Unable to contact slurm controller" in report["warning"]
    assert [(job["state"], job["alive"]) for job in report["jobs"]] == [("completed", False), ("unknown", None)]
    ended = cli("jobs", *names)
    assert ended.status == 0
    assert ended.err.startswith("warning: SLURM was not asked: ")
    assert "completed" in ended.out


@pytest.mark.usefixtures("no_slurm")
def test_without_any_job_the_list_says_so(cli):
    ended = cli("jobs")
    assert (ended.status, ended.out) == (0, "none in the queue or ended within a day; --all lists all\n")


# tpi cancel


def test_cancel_ends_the_judge_before_the_array(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2", "tp4"))
    now(made.attempt("tp1", outcome="completed"))
    now(made.steps(20, "tp1"))
    now(made.steps(3, "tp2"))
    slurm.scene(row("12_1", "RUNNING"), row("12_2", "PENDING", "Resources"), row("13", "PENDING", "Dependency"))
    ended = cli("cancel", "v")
    assert (ended.status, ended.err) == (0, "")
    assert slurm.calls("scancel") == ["13", "12"]
    assert ended.out.splitlines() == [
        "12_0 v/tp1: has ended already: completed",
        "12_1 v/tp2: cancelled (was running)",
        "12_2 v/tp4: cancelled (was pending (Resources))",
        "13 v: cancelled (was pending (Dependency))",
        "a run that can save in time does; continue it:",
        f"  sbatch --array=1 {made.directory}/job.sbatch",
    ]


def test_cancel_of_a_job_that_has_ended_is_no_mistake(cli, slurm, submitted):
    now(submitted().attempt(outcome="completed"))
    slurm.scene()
    ended = cli("cancel", "12")
    assert (ended.status, ended.out) == (0, "12 a: has ended already: completed\n")
    assert slurm.calls("scancel") == []


def test_cancel_does_not_say_ended_of_a_job_of_which_nothing_is_known(cli, slurm, submitted):
    submitted()
    slurm.scene()
    ended = cli("cancel", "12")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "error: SLURM does not know 12, and no run recorded an end: squeue --me lists your jobs\n"
