"""`tpi jobs`: the table."""

import json
import os

import pytest

from tests.unit.jobs.fake_slurm import age, now, row


def test_the_table_of_a_verify(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    slurm.scene(row("12_1", "RUNNING", remaining="1-02:03:04"), row("13", "PENDING", "Dependency"))
    now(made.attempt("tp1", outcome="completed"))
    now(made.steps(20, "tp1"))
    degrees = {"tp": 2, "pp": 1, "dp": 4, "sp": True}
    for dp in (4, 4, 2):
        repeated = made.attempt("tp2", job={"id": "14", "restart": 2, "nodes": "n2"}, layout=degrees | {"dp": dp})
    now(repeated)
    now(made.steps(7, "tp2", torn='{"step": 8, "lo'))
    ended = cli("jobs")
    assert (ended.status, ended.err) == (0, "")
    lines = [" ".join(line.split()) for line in ended.out.splitlines() if line.strip()]
    assert lines[0] == "job run state layout step loss time left"
    assert lines[1:] == [
        "12_0 v/tp1 completed 20 of 20 3.0000",
        "12_1 v/tp2 running try 3 tp=2 dp=4 → tp=2 dp=2 7 of 20 4.3000 1-02:03:04",
        "13 v (judge) pending (Dependency)",
    ]


def test_a_judge_that_has_ended_shows_the_verdict(cli, slurm, submitted):
    made = submitted("v", cells=("tp1",))
    slurm.scene()
    verdict = {"verdict": "different", "exit_status": 1, "text": "different: tp=2 computed other bits"}
    (made.directory / "verify.json").write_text(json.dumps(verdict))
    result = json.loads(cli("jobs", "v", "--json").out)["jobs"][-1]
    assert (result["role"], result["state"], result["exit_status"]) == ("judge", "different", 1)
    assert "13 v: different: tp=2 computed other bits" in cli("jobs", "v").out


def test_without_names_the_queue_and_the_last_day_are_listed(cli, slurm, submitted):
    for number, name in enumerate(("queued", "recent", "old", "gone", "gone-queued")):
        made = submitted(name, str(10 + number))
        if name in ("queued", "old"):
            age(made.directory)
        if name.startswith("gone"):
            os.rename(made.directory, made.directory.with_name(f"x{number}"))
    slurm.scene(row("10", "PENDING"), row("14", "RUNNING"), row("99", "RUNNING", name="somebody's own"))
    names = [job["run"] for job in json.loads(cli("jobs", "--json").out)["jobs"]]
    assert names == ["queued", "recent", "gone-queued"]
    assert "--me" in slurm.calls("squeue")[0]
    names = [job["run"] for job in json.loads(cli("jobs", "--all", "--json").out)["jobs"]]
    assert names == ["queued", "recent", "old", "gone-queued"]


def test_a_run_whose_directory_is_gone_still_has_a_state(cli, slurm, submitted):
    made = submitted("a")
    os.rename(made.directory, made.directory.with_name("b"))
    slurm.scene(row("12", "RUNNING"))
    (result,) = json.loads(cli("jobs", "12", "--json").out)["jobs"]
    assert (result["state"], result["step"], result["note"]) == ("RUNNING", None, f"{made.directory} is gone")


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
@pytest.mark.parametrize("command", (["wait", "a"], ["cancel", "a"], ["logs", "-f", "a"]), ids=lambda c: c[0])
def test_where_slurm_is_not_installed_commands_that_need_it_say_so(cli, submitted, command):
    submitted()
    ended = cli(*command)
    assert (ended.status, ended.out) == (2, "")
    assert "SLURM is not installed here" in ended.err


@pytest.mark.usefixtures("no_slurm")
def test_without_any_job_the_list_says_so(cli):
    ended = cli("jobs")
    assert (ended.status, ended.out) == (0, "none in the queue or ended within a day; --all lists all\n")
