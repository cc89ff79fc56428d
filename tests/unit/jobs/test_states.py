# SPDX-License-Identifier: Apache-2.0
"""What state a job is in, out of what SLURM, accounting and the run directory say."""

import json

import pytest

from tests.unit.jobs.fake_slurm import now, row

# States: what squeue, run.json and sacct say -> word, exit status (None: not ended), and words of the note.

AGAIN = {"outcome": "stopped", "requeued": True}
SECOND = {"job": {"id": "12", "restart": 1, "nodes": "n1"}}
KILLED = {"outcome": "failed", "why": "rank 1 was killed"}
NO_ROOM = {"outcome": "failed", "why": "no room"}
DONE, STOPPED = {"outcome": "completed"}, {"outcome": "stopped"}
STATES = {
    "pending": (row("12", "PENDING", "Resources"), None, None, ("PENDING (Resources)", None, None)),
    "running": (row("12", "RUNNING"), {}, None, ("RUNNING", None, None)),
    "running again": (row("12", "RUNNING"), SECOND, None, ("RUNNING start 2", None, None)),
    "queued again": (row("12", "PENDING", "BeginTime"), AGAIN, None, ("PENDING (BeginTime)", None, None)),
    "completing": (row("12", "COMPLETING"), DONE, None, ("COMPLETING", None, None)),
    "over, remembered": (row("12", "COMPLETED"), DONE, None, ("COMPLETED", 0, None)),
    "failed, remembered": (row("12", "FAILED", "NonZero"), KILLED, None, ("FAILED", 2, "rank 1 was killed")),
    "accounted": ("", DONE, "12|COMPLETED", ("COMPLETED", 0, None)),
    "accounts are late": ("", DONE, "12|RUNNING", ("completed", 0, None)),
    "cancelled": ("", STOPPED, "12|CANCELLED by 0", ("CANCELLED", 2, None)),
    "timed out": ("", {}, "12|TIMEOUT", ("TIMEOUT", 2, "it recorded no exit status")),
    "completed": ("", DONE, None, ("completed", 0, None)),
    "failed": ("", NO_ROOM, None, ("failed", 2, "no room")),
    "stopped": ("", STOPPED, None, ("stopped", 2, None)),
    "lost in the queue": ("", AGAIN, None, ("stopped", 2, "it was to be queued again, and is in the queue no more")),
    "killed": ("", {}, None, ("unknown", 2, "it recorded no exit status, and no log")),
    "never began": ("", None, None, ("unknown", 2, "it recorded no start, and no log")),
    "cancelled before": ("", None, "12|CANCELLED by 0", ("CANCELLED", 2, "it recorded no start")),
    "another command": ("", DONE | {"job": None}, None, ("unknown", 2, "it recorded no start")),
}


@pytest.mark.parametrize("queued, attempt, accounts, expected", STATES.values(), ids=STATES)
def test_the_state_of_a_job(cli, slurm, submitted, queued, attempt, accounts, expected):
    made = submitted()
    slurm.scene(*filter(None, [queued]))
    if accounts:
        slurm.accounts(accounts)
    if attempt is not None:
        now(made.attempt(**attempt))
    ended = cli("jobs", "12", "--json")
    assert (ended.status, ended.err) == (0, "")
    (result,) = json.loads(ended.out)["jobs"]
    text, status, note = expected
    reason = f" ({result['reason']})" if result["reason"] else ""
    repeated = f" start {result['tries']}" if result["tries"] > 1 else ""
    assert (result["state"] + reason + repeated, result["exit_status"]) == (text, status)
    assert result["alive"] is (status is None)
    assert note in result["note"] if note else result["note"] is None
    assert len(slurm.calls("squeue")) == 1


def test_a_script_that_was_resubmitted_is_followed_by_its_new_id(cli, slurm, submitted):
    made = submitted()
    now(made.attempt(outcome="stopped"))
    now(made.attempt(job={"id": "57", "restart": 0, "nodes": "n1"}))
    slurm.scene(row("57", "RUNNING"))
    (result,) = json.loads(cli("jobs", "a", "--json").out)["jobs"]
    assert (result["job"], result["state"]) == ("57", "RUNNING")


def test_an_id_of_another_cluster_is_not_taken_for_this_one(cli, slurm, submitted):
    made = submitted("a")
    now(made.attempt(outcome="completed"))
    submitted("b")
    slurm.scene(row("12", "RUNNING"))
    slurm.accounts("12|FAILED")
    a, b = json.loads(cli("jobs", "a", "b", "--json").out)["jobs"]
    assert (a["state"], a["exit_status"]) == ("completed", 0)
    assert b["state"] == "RUNNING"


def test_tasks_that_were_cancelled_at_once_have_one_account(cli, slurm, submitted):
    submitted("v", cells=("tp1", "tp2", "tp4", "tp8"))
    slurm.scene(row("12_3", "RUNNING"))
    slurm.accounts("12_0|COMPLETED", "12_[1-2%1]|CANCELLED by 0", "13|CANCELLED by 0")
    results = json.loads(cli("jobs", "v", "--json").out)["jobs"]
    assert [result["state"] for result in results] == ["COMPLETED", "CANCELLED", "CANCELLED", "RUNNING", "CANCELLED"]
    assert [result["run"] for result in results] == ["v/tp1", "v/tp2", "v/tp4", "v/tp8", "v"]
