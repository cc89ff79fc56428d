# SPDX-License-Identifier: Apache-2.0
"""`tpi wait`: when it ends, and with which status."""

import json

import pytest

from tests.unit.jobs.fake_slurm import now, row
from tp_invariant_recipes.jobs import states


def test_wait_goes_on_over_a_requeue_and_says_what_changes(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "PENDING", "Resources"))
    slurm.scene(row("12", "RUNNING"), before=made.attempt())
    slurm.scene(row("12", "RUNNING"), before=made.steps(7))
    slurm.scene(row("12", "COMPLETING"), before=made.end(outcome="stopped", requeued=True))
    slurm.scene(row("12", "PENDING", "BeginTime"))
    slurm.scene(row("12", "RUNNING"), before=made.attempt(from_step=7, job={"id": "12", "restart": 1, "nodes": "n1"}))
    slurm.scene(before=f"{made.end(outcome='completed')}\n{made.steps(20)}")
    ended = cli("wait", "12")
    assert (ended.status, ended.out) == (0, "12 a: completed at step 20 of 20, loss 3.0000\n")
    assert ended.err.splitlines() == [
        "12 a: pending (Resources)",
        "12 a: running on n1",
        "12 a: completing",
        "12 a: pending (BeginTime)",
        "12 a: running start 2 on n1",
    ]


def test_wait_for_a_job_that_leaves_no_word_ends_in_the_end(cli, slurm, submitted, monkeypatch):
    monkeypatch.setattr(states, "SETTLE", 1.0)
    made = submitted()
    now(made.attempt())
    log = made.directory / "logs" / "job-12.log"
    now(made.put(log, "slurmstepd: error: Detected 1 oom-kill event\n"))
    slurm.scene()
    ended = cli("wait", "a")
    assert (ended.status, ended.out) == (2, f"12 a: unknown: it recorded no exit status; its log: {log}\n")
    assert len(slurm.calls("squeue")) > 2


def test_wait_prints_why_a_run_failed(cli, slurm, submitted):
    made = submitted()
    now(made.attempt(outcome="failed", why="rank 1 was killed by SIGKILL\nits log: [b]x[/b]"))
    slurm.scene(row("12", "FAILED"))
    ended = cli("wait", "12")
    assert (ended.status, ended.out) == (2, "12 a: failed: rank 1 was killed by SIGKILL\nits log: [b]x[/b]\n")


VERDICTS = (
    (0, "identical", "completed"),
    (1, "different", "completed"),
    (2, "incomplete", "failed"),
    (0, "identical", "failed"),  # it was gone on with by hand, and judged again
)


@pytest.mark.parametrize("status, verdict, outcome", VERDICTS)
def test_wait_for_a_verify_ends_with_the_status_of_the_verdict(cli, slurm, submitted, status, verdict, outcome):
    made = submitted("v", cells=("tp1", "tp2"))
    outcomes = {"tp1": "completed", "tp2": outcome}
    for cell, outcome in outcomes.items():
        now(made.attempt(cell, outcome=outcome, why="no room" if outcome == "failed" else None))
    result = json.dumps({"verdict": verdict, "exit_status": status, "text": f"{verdict}: in a line"})
    slurm.scene(row("13", "RUNNING"))
    slurm.scene(row("13", "COMPLETED" if status == 0 else "FAILED"))  # the file comes later
    slurm.scene(row("13", "COMPLETED"), before=made.put(made.directory / "verify.json", result))
    ended = cli("wait", "v")
    failed = ["12_1 v/tp2: failed: no room"] if outcome == "failed" else []
    assert (ended.status, ended.out.splitlines()) == (status, [*failed, f"12 v: {verdict}: in a line"])


def test_wait_for_several_ends_with_the_worst_status(cli, slurm, submitted):
    now(submitted("a").attempt(outcome="completed"))
    made = submitted("v", "14", cells=("tp1",))
    now(made.attempt("tp1", outcome="completed"))
    (made.directory / "verify.json").write_text('{"verdict": "different", "exit_status": 1, "text": "different"}')
    slurm.scene(row("12", "RUNNING"), row("15", "RUNNING"))
    slurm.scene(row("15", "RUNNING"))
    slurm.scene()
    ended = cli("wait", "a", "v")
    assert ended.status == 1
    assert [line.split(":")[0] for line in ended.out.splitlines()] == ["12 a", "14 v"]


def test_a_controller_that_is_away_for_a_while_does_not_end_a_wait(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "RUNNING"))
    slurm.scene(away=True)
    slurm.scene(away=True)
    slurm.scene(before=made.attempt(outcome="completed"))
    ended = cli("wait", "12")
    assert ended.status == 0
    assert ended.err.count("no answer, asking again and again: ") == 1
