"""`tpi jobs`, `tpi logs`, `tpi cancel` and `tpi wait`, with SLURM's commands played by scripts on PATH.

Each call of squeue is a scene: its rows, and before them whatever changes in the run directory meanwhile. The last
scene stays.
"""

import io
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import follow, registry
from tp_invariant_recipes.jobs.follow import Source, Tails
from tp_invariant_recipes.runs.run_dir import RunDir

SQUEUE = r"""#!/bin/bash
echo "squeue $*" >>{folder}/calls
n=$(( $(cat {folder}/number) + 1 ))
if [[ -e {folder}/scene-$n ]]; then echo "$n" >{folder}/number; else n=$((n - 1)); fi
. {folder}/scene-$n
"""
SACCT = r"""#!/bin/bash
echo "sacct $*" >>{folder}/calls
cat {folder}/accounts 2>/dev/null || {{ echo "Slurm accounting storage is disabled" >&2; exit 1; }}
"""
SCANCEL = r"""#!/bin/bash
echo "scancel $*" >>{folder}/calls
"""
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def row(job: str, state: str, reason: str = "None", left: str = "9:00", nodes: str = "n1", name: str = "tpi") -> str:
    """A row of squeue's; job: "12", or "12_3", "12_[0-4]" of an array."""
    of, _, task = job.partition("_")
    return "|".join((of, task.strip("[]") or "N/A", state, reason, left, nodes, name))


@dataclass
class Slurm:
    """SLURM's commands on PATH."""

    folder: Path
    scenes: int = 0

    def scene(self, *rows: str, before: str = "", away: bool = False) -> None:
        """The next answer of squeue. before: shell commands that run first. away: the controller does not answer."""
        self.scenes += 1
        lines = [before, AWAY if away else "", *(f"echo {shlex.quote(one)}" for one in rows), "true"]
        (self.folder / f"scene-{self.scenes}").write_text("\n".join(lines))

    def accounts(self, *rows: str) -> None:
        """What sacct says; without, no accounts are kept."""
        (self.folder / "accounts").write_text("".join(f"{one}\n" for one in rows))

    def calls(self, command: str) -> list[str]:
        """The arguments of each call of a command."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{command} ")]


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for name, value in {"FIRST_PAUSE": 0.0, "LONGEST_PAUSE": 0.01, "LOOK": 0.01}.items():
        monkeypatch.setattr(follow, name, value)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "number").write_text("0")
    for name, text in {"squeue": SQUEUE, "sacct": SACCT, "scancel": SCANCEL}.items():
        (folder / name).write_text(text.format(folder=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Slurm(folder)


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@dataclass
class Made:
    """A submission as `tpi submit` leaves it, and what its jobs would write."""

    directory: Path
    files: dict[str, str] = field(default_factory=dict)

    def attempt(self, cell: str = "", **facts: object) -> str:
        """Shell commands that add an attempt to `run.json`; `cell`: of this one."""
        run = self.directory / cell / "run.json"
        attempts = json.loads(self.files.get(str(run), '{"attempts": []}'))["attempts"]
        whole = {"from_step": 0, "to_step": 20, "job": {"id": "12", "restart": 0, "nodes": ["n1"]}, "outcome": None}
        attempts = [*attempts, whole | {"why": None, "requeued": False} | facts]
        self.files[str(run)] = json.dumps({"attempts": attempts})
        return self.put(run, self.files[str(run)])

    def end(self, cell: str = "", **facts: object) -> str:
        """Shell commands that end the last attempt."""
        run = self.directory / cell / "run.json"
        whole = json.loads(self.files[str(run)])
        whole["attempts"][-1] |= facts
        self.files[str(run)] = json.dumps(whole)
        return self.put(run, self.files[str(run)])

    def steps(self, count: int, cell: str = "", torn: str = "") -> str:
        """Shell commands that write a progress file; torn: a line that is not whole."""
        lines = [json.dumps({"step": n, "loss": 5 - n / 10}) for n in range(1, count + 1)]
        return self.put(self.directory / cell / "progress.jsonl", "\n".join(lines) + "\n" + torn)

    @staticmethod
    def put(file: Path, text: str) -> str:
        return f"mkdir -p {shlex.quote(str(file.parent))}; printf %s {shlex.quote(text)} >{shlex.quote(str(file))}"


def now(commands: str) -> None:
    """Run shell commands at once."""
    assert os.system(commands) == 0


@pytest.fixture
def submitted(tmp_path: Path) -> Callable[..., Made]:
    """`submitted("a")` is a submitted run of that name, job 12; with cells a verify, 12 the array and 13 its judge."""

    def make(
        name: str = "a", job: str = "12", cells: Iterable[str] = (), *, known: bool = True, shared: bool = True
    ) -> Made:
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        judge = [{"id": str(int(job) + 1), "role": "judge"}] if cells else []
        facts = {
            "schema": 1,
            "kind": "verify" if cells else "train",
            "model": "qwen3_toy",
            "command": "tpi submit qwen3_toy",
            "time": "2026-01-01T12:00:00+0000",
            "directory": str(directory),
            "jobs": [{"id": job, "role": "cells" if cells else "train"}, *judge],
        }
        RunDir(directory).submission.write_text(json.dumps(facts | ({"cells": [*cells]} if cells else {})))
        for run in (directory, *(directory / cell for cell in cells)):
            run.mkdir(exist_ok=True)
            RunDir(run).config.write_text(f"cluster: {{shared_files: {str(shared).lower()}}}\n")
            RunDir(run).run.write_text('{"attempts": []}')
        if known:
            registry.remember(directory, [job, *(one["id"] for one in judge)])
        return Made(directory)

    return make


def age(directory: Path, seconds: float = 2 * 24 * 3600) -> None:
    """Make all files of a directory older."""
    for file in directory.rglob("*"):
        os.utime(file, (time.time() - seconds,) * 2)


# The registry


def test_the_registry_gives_ids_their_directories_in_order(tmp_path):
    registry.remember(tmp_path / "a", ["12"])
    registry.remember(tmp_path / "b", ["13", "14"])
    assert registry.registered().lines == (("12", tmp_path / "a"), ("13", tmp_path / "b"), ("14", tmp_path / "b"))
    assert registry.registry() == tmp_path / "state" / "tpi" / "jobs.jsonl"


def test_the_registry_lies_in_the_home_where_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    registry.remember(tmp_path / "a", ["12"])
    assert (tmp_path / ".local/state/tpi/jobs.jsonl").is_file()


def test_an_id_that_comes_twice_is_that_of_the_later_submission(tmp_path):
    for name in ("a", "b"):
        registry.remember(tmp_path / name, ["12"])
    assert registry.registered().owners == {"12": tmp_path / "b"}
    assert registry.registered().directories == [tmp_path / "a", tmp_path / "b"]


TORN = ('{"job": "13', '{"job": "13"}', "[]", "null", '{"job": "13", "directory": 5}', "\xff")


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_line_costs_no_other(tmp_path, torn):
    registry.remember(tmp_path / "a", ["12"])
    with registry.registry().open("a", encoding="latin-1") as stream:
        stream.write(torn)
    registry.remember(tmp_path / "c", ["14"])
    assert registry.registered().owners == {"12": tmp_path / "a", "14": tmp_path / "c"}


def test_submissions_at_the_same_time_do_not_mix(tmp_path):
    def submit(first: int) -> None:
        for n in range(first, first + 100, 2):
            registry.remember(tmp_path / str(n), [str(n), str(n + 1)])

    threads = [threading.Thread(target=submit, args=(100 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.registered().owners == {str(n): tmp_path / str(n - n % 2) for n in range(800)}


def test_a_registry_that_cannot_be_written_is_said(tmp_path):
    registry.registry().mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*jobs\.jsonl: Is a directory"):
        registry.remember(tmp_path, ["12"])


def test_a_registry_that_cannot_be_read_is_said(cli):
    registry.registry().mkdir(parents=True)
    ended = cli("jobs")
    assert (ended.status, ended.err) == (2, f"error: cannot read {registry.registry()}: Is a directory\n")


# Finding


@pytest.mark.parametrize("name", ("12", "a", "runs/a", "./runs/a/", "~/a"))
def test_a_job_is_found_by_its_id_its_name_and_its_directory(submitted, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path / "runs"))
    made = submitted("a")
    submitted("b", "14")
    (found,) = registry.find([name])
    assert found.directory == made.directory
    assert [(part.id, part.role, part.run.path, part.ours) for part in found.parts] == [
        ("12", "train", made.directory, True)
    ]


def test_a_directory_needs_no_registry(submitted):
    made = submitted("a", known=False)
    assert registry.find(["runs/a"])[0].directory == made.directory
    with pytest.raises(RunError, match="no job a"):
        registry.find(["a"])


def test_a_verify_is_an_array_and_a_judge(submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    for name in ("12", "13", "v"):
        (found,) = registry.find([name])
        assert [(part.id, part.role, part.run.path) for part in found.parts] == [
            ("12_0", "cell", made.directory / "tp1"),
            ("12_1", "cell", made.directory / "tp2"),
            ("13", "judge", made.directory),
        ]
    (found,) = registry.find(["12_1"])
    assert [part.name for part in found.parts] == ["v/tp2"]


def test_a_name_of_several_runs_is_refused_with_their_directories(submitted, tmp_path):
    submitted("x/a")
    submitted("y/a", "14")
    with pytest.raises(RunError) as refused:
        registry.find(["a"])
    assert str(refused.value).splitlines() == [
        "a is the name of 2 runs; say which:",
        f"  {tmp_path}/runs/x/a",
        f"  {tmp_path}/runs/y/a",
    ]


UNKNOWN = (
    ("qwen3_toy-tp2-202602", "no job qwen3_toy-tp2-202602; did you mean 'qwen3_toy-tp2-202601'?"),
    ("99", "job 99 was not submitted by tpi from this account"),
    ("13_2", "job 13_2 is none of "),
    ("runs/x", "runs/x was not submitted: there is no submission.json in it"),
)


@pytest.mark.parametrize("name, says", UNKNOWN, ids=[name for name, _ in UNKNOWN])
def test_an_unknown_job_is_named_with_near_ones(submitted, tmp_path, name, says):
    submitted("qwen3_toy-tp2-202601", "12")
    submitted("v", "13", cells=("tp1", "tp2"))
    (tmp_path / "runs" / "x").mkdir()
    with pytest.raises(RunError) as refused:
        registry.find([name])
    assert str(refused.value).startswith(says)


def test_all_that_is_unknown_is_said_at_once(submitted):
    submitted("a")
    with pytest.raises(RunError) as refused:
        registry.find(["99", "a", "b"])
    assert [line.split(";")[0] for line in str(refused.value).splitlines()] == [
        "job 99 was not submitted by tpi from this account",
        "no job b",
    ]


@pytest.mark.parametrize(
    "text",
    ("{", "[]", '{"schema": 2}', '{"schema": 1, "jobs": []}', '{"schema": 1, "jobs": [{"id": "12", "role": "x"}]}'),
)
def test_a_broken_submission_is_an_error_that_names_the_file(submitted, text):
    made = submitted("a", known=False)
    RunDir(made.directory).submission.write_text(text)
    with pytest.raises(RunError, match=r"runs/a/submission\.json cannot be read"):
        registry.find(["runs/a"])


def test_completion_offers_ids_and_names_of_what_is_there(submitted):
    submitted("a1")
    submitted("a2", "14")
    gone = submitted("a3", "16")
    os.rename(gone.directory, gone.directory.with_name("elsewhere"))
    assert registry.completions("1") == [("14", "a2"), ("12", "a1")]
    assert [name for name, _ in registry.completions("a")] == ["a2", "a1"]


# States: what squeue, run.json and sacct say -> word, exit status (None: not ended), and words of the note.

STATES = {
    "pending": (row("12", "PENDING", "Resources"), None, None, ("PENDING (Resources)", None, None)),
    "running": (row("12", "RUNNING"), {}, None, ("RUNNING", None, None)),
    "running again": (
        row("12", "RUNNING"),
        {"job": {"id": "12", "restart": 1, "nodes": []}},
        None,
        ("RUNNING try 2", None, None),
    ),
    "queued again": (
        row("12", "PENDING", "BeginTime"),
        {"outcome": "stopped", "requeued": True},
        None,
        ("PENDING (BeginTime)", None, None),
    ),
    "completing": (row("12", "COMPLETING"), {"outcome": "completed"}, None, ("COMPLETING", None, None)),
    "over, remembered": (row("12", "COMPLETED"), {"outcome": "completed"}, None, ("COMPLETED", 0, None)),
    "failed, remembered": (
        row("12", "FAILED", "NonZeroExitCode"),
        {"outcome": "failed", "why": "rank 1 was killed"},
        None,
        ("FAILED", 2, "rank 1 was killed"),
    ),
    "accounted": ("", {"outcome": "completed"}, "12|COMPLETED|0:0", ("COMPLETED", 0, None)),
    "accounts are late": ("", {"outcome": "completed"}, "12|RUNNING|0:0", ("completed", 0, None)),
    "cancelled": ("", {"outcome": "stopped"}, "12|CANCELLED by 0|0:15", ("CANCELLED", 2, None)),
    "timed out": ("", {}, "12|TIMEOUT|0:0", ("TIMEOUT", 2, "it left no word of its end")),
    "completed": ("", {"outcome": "completed"}, None, ("completed", 0, None)),
    "failed": ("", {"outcome": "failed", "why": "no room"}, None, ("failed", 2, "no room")),
    "stopped": ("", {"outcome": "stopped"}, None, ("stopped", 2, None)),
    "lost in the queue": (
        "",
        {"outcome": "stopped", "requeued": True},
        None,
        ("stopped", 2, "it was to be queued again, and is in the queue no more"),
    ),
    "killed": ("", {}, None, ("unknown", 2, "it left no word of its end, and no log")),
    "never began": ("", None, None, ("unknown", 2, "it left no word of having begun, and no log")),
    "cancelled before": ("", None, "12|CANCELLED by 0|0:0", ("CANCELLED", 2, "it left no word of having begun")),
    "another command": ("", {"job": None, "outcome": "completed"}, None, ("unknown", 2, "it left no word of having")),
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
    (found,) = json.loads(ended.out)["jobs"]
    text, status, note = expected
    reason = f" ({found['reason']})" if found["reason"] else ""
    again = f" try {found['tries']}" if found["tries"] > 1 else ""
    assert (found["state"] + reason + again, found["exit_status"]) == (text, status)
    assert found["alive"] is (status is None)
    assert note in found["note"] if note else found["note"] is None
    assert slurm.calls("squeue") == [slurm.calls("squeue")[0]]
    assert "--jobs=12" in slurm.calls("squeue")[0]


def test_a_script_that_was_handed_in_again_is_followed_by_its_new_id(cli, slurm, submitted):
    made = submitted()
    now(made.attempt(outcome="stopped"))
    now(made.attempt(job={"id": "57", "restart": 0, "nodes": ["n1"]}))
    slurm.scene(row("57", "RUNNING"))
    (found,) = json.loads(cli("jobs", "a", "--json").out)["jobs"]
    assert (found["job"], found["state"]) == ("57", "RUNNING")


def test_an_id_of_another_cluster_is_not_taken_for_this_one(cli, slurm, submitted):
    made = submitted("a")
    now(made.attempt(outcome="completed"))
    submitted("b")
    slurm.scene(row("12", "RUNNING"))
    slurm.accounts("12|FAILED|1:0")
    a, b = json.loads(cli("jobs", "a", "b", "--json").out)["jobs"]
    assert (a["state"], a["exit_status"]) == ("completed", 0)
    assert b["state"] == "RUNNING"


# Tasks of an array of three, as squeue may write them.
ARRAYS = (
    (["12_[0-2]"], ["PENDING"] * 3),
    (["12_[1-2%1]", "12_0"], ["RUNNING", "PENDING", "PENDING"]),
    (["12_1", "12_[0,2]"], ["PENDING", "RUNNING", "PENDING"]),
    (["12_[0,2,...]", "12_1"], ["PENDING", "RUNNING", "PENDING"]),
    (["12_2"], ["unknown", "unknown", "RUNNING"]),
)


@pytest.mark.parametrize("rows, words", ARRAYS, ids=[" ".join(rows) for rows, _ in ARRAYS])
def test_the_tasks_of_an_array_have_rows_of_their_own(cli, slurm, submitted, rows, words):
    submitted("v", cells=("tp1", "tp2", "tp4"))
    slurm.scene(*(row(one, "PENDING" if "[" in one else "RUNNING") for one in rows), row("13", "PENDING", "Dependency"))
    found = json.loads(cli("jobs", "v", "--json").out)["jobs"]
    assert [one["state"] for one in found] == [*words, "PENDING"]
    assert [one["run"] for one in found] == ["v/tp1", "v/tp2", "v/tp4", "v"]


def test_tasks_that_were_cancelled_together_have_one_account(cli, slurm, submitted):
    submitted("v", cells=("tp1", "tp2", "tp4"))
    slurm.scene()
    slurm.accounts("12_0|COMPLETED|0:0", "12_[1-2]|CANCELLED by 0|0:0", "13|CANCELLED by 0|0:0")
    found = json.loads(cli("jobs", "v", "--json").out)["jobs"]
    assert [one["state"] for one in found] == ["COMPLETED", "CANCELLED", "CANCELLED", "CANCELLED"]


# tpi jobs


def test_the_table_of_a_verify(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    slurm.scene(row("12_1", "RUNNING", left="1-02:03:04"), row("13", "PENDING", "Dependency"))
    now(made.attempt("tp1", outcome="completed"))
    now(made.steps(20, "tp1"))
    now(made.attempt("tp2", job={"id": "14", "restart": 2, "nodes": ["n2"]}))
    now(made.steps(7, "tp2", torn='{"step": 8, "lo'))
    ended = cli("jobs")
    assert (ended.status, ended.err) == (0, "")
    lines = [" ".join(line.split()) for line in ended.out.splitlines() if line.strip()]
    assert lines[0] == "job run state step loss time left"
    assert lines[2:] == [
        "12_0 v/tp1 completed 20 of 20 3.0000",
        "12_1 v/tp2 RUNNING try 3 7 of 20 4.3000 1-02:03:04",
        "13 v (judge) PENDING (Dependency)",
    ]


def test_a_judge_that_has_ended_shows_the_verdict(cli, slurm, submitted):
    made = submitted("v", cells=("tp1",))
    slurm.scene()
    verdict = {"verdict": "different", "exit_status": 1, "text": "different: tp=2 computed other bits"}
    (made.directory / "verify.json").write_text(json.dumps(verdict))
    found = json.loads(cli("jobs", "v", "--json").out)["jobs"][-1]
    assert (found["role"], found["state"], found["exit_status"]) == ("judge", "different", 1)
    assert "13 v: different: tp=2 computed other bits" in cli("jobs", "v").out


def test_without_names_the_queue_and_the_last_day_are_listed(cli, slurm, submitted):
    for number, name in enumerate(("queued", "recent", "old", "gone", "gone-queued")):
        made = submitted(name, str(10 + number))
        if name in ("queued", "old"):
            age(made.directory)
        if name.startswith("gone"):
            os.rename(made.directory, made.directory.with_name(f"x{number}"))
    slurm.scene(row("10", "PENDING"), row("14", "RUNNING"), row("99", "RUNNING", name="somebody's own"))
    names = [one["run"] for one in json.loads(cli("jobs", "--json").out)["jobs"]]
    assert names == ["queued", "recent", "gone-queued"]
    assert "--me" in slurm.calls("squeue")[0]
    names = [one["run"] for one in json.loads(cli("jobs", "--all", "--json").out)["jobs"]]
    assert names == ["queued", "recent", "old", "gone-queued"]


def test_a_run_whose_directory_is_gone_still_has_a_state(cli, slurm, submitted):
    made = submitted("a")
    os.rename(made.directory, made.directory.with_name("b"))
    slurm.scene(row("12", "RUNNING"))
    (found,) = json.loads(cli("jobs", "12", "--json").out)["jobs"]
    assert (found["state"], found["step"], found["note"]) == ("RUNNING", None, f"{made.directory} is gone")


def test_files_that_stay_on_the_nodes_are_said_to(cli, slurm, submitted):
    submitted("a", shared=False)
    slurm.scene(row("12", "RUNNING", nodes="n1,n2"))
    slurm.scene()
    slurm.accounts("12|COMPLETED|0:0")
    words = "its steps and losses are in {} on {}, its log in /tmp there (cluster.shared_files=false)"
    running, over = (json.loads(cli("jobs", "12", "--json").out)["jobs"][0] for _ in range(2))
    assert (running["step"], running["note"]) == (None, words.format(running["directory"], "n1"))
    assert (over["exit_status"], over["note"]) == (0, words.format(over["directory"], "the first of its nodes"))


@pytest.mark.parametrize("names", ((), ("a", "b")), ids=("listed", "named"))
def test_without_the_controller_run_directories_speak(cli, slurm, submitted, names):
    now(submitted("a").attempt(outcome="completed"))
    now(submitted("b", "14").attempt(job={"id": "14", "restart": 0, "nodes": []}))
    slurm.scene(away=True)
    ended = cli("jobs", *names, "--json")
    report = json.loads(ended.out)
    assert "Unable to contact slurm controller" in report["warning"]
    assert [(one["state"], one["alive"]) for one in report["jobs"]] == [("completed", False), ("unknown", None)]
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


# tpi wait


def test_wait_goes_on_over_a_requeue_and_says_what_changes(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "PENDING", "Resources"))
    slurm.scene(row("12", "RUNNING"), before=made.attempt())
    slurm.scene(row("12", "RUNNING"), before=made.steps(7))
    slurm.scene(row("12", "COMPLETING"), before=made.end(outcome="stopped", requeued=True))
    slurm.scene(row("12", "PENDING", "BeginTime"))
    slurm.scene(row("12", "RUNNING"), before=made.attempt(from_step=7, job={"id": "12", "restart": 1, "nodes": []}))
    slurm.scene(before=f"{made.end(outcome='completed')}\n{made.steps(20)}")
    ended = cli("wait", "12")
    assert (ended.status, ended.out) == (0, "12 a: completed at step 20 of 20, loss 3.0000\n")
    assert ended.err.splitlines() == [
        "12 a: PENDING (Resources)",
        "12 a: RUNNING on n1",
        "12 a: COMPLETING",
        "12 a: PENDING (BeginTime)",
        "12 a: RUNNING try 2 on n1",
    ]


def test_wait_gives_the_files_time_to_be_seen(cli, slurm, submitted):
    made = submitted()
    now(made.attempt())
    slurm.scene(row("12", "RUNNING"))
    for _ in range(5):
        slurm.scene(row("12", "COMPLETED"))
    slurm.scene(row("12", "COMPLETED"), before=made.end(outcome="completed"))
    ended = cli("wait", "a")
    assert (ended.status, ended.out) == (0, "12 a: COMPLETED\n")
    assert len(slurm.calls("squeue")) == 7


def test_wait_does_not_take_the_word_of_an_earlier_try_for_the_last(cli, slurm, submitted):
    made = submitted()
    now(made.attempt(outcome="stopped", requeued=True))
    slurm.scene(row("12", "COMPLETED"))
    slurm.scene(row("12", "COMPLETED"))
    slurm.scene(before=made.attempt(outcome="completed", job={"id": "12", "restart": 1, "nodes": []}))
    assert cli("wait", "a").out == "12 a: completed\n"


def test_wait_goes_on_when_a_job_that_has_ended_is_started_again(slurm, submitted, monkeypatch):
    made = submitted()
    clock = [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])
    slurm.scene(row("12", "FAILED"))
    for _ in range(20):
        slurm.scene(row("12", "RUNNING"))
    slurm.scene(before=made.attempt(outcome="completed"))
    watch = follow.SubmissionWatch(registry.find(["12"]), lambda line: None)
    while not watch():
        clock[0] += 1.0
    assert [state.word for state in watch.states[0]] == ["completed"]
    assert clock[0] > follow.SETTLE


def test_wait_for_a_job_that_leaves_no_word_ends_in_the_end(cli, slurm, submitted, monkeypatch):
    monkeypatch.setattr(follow, "SETTLE", 1.0)
    made = submitted()
    now(made.attempt())
    log = made.directory / "logs" / "job-12.log"
    now(made.put(log, "slurmstepd: error: Detected 1 oom-kill event\n"))
    slurm.scene()
    ended = cli("wait", "a")
    assert (ended.status, ended.out) == (2, f"12 a: unknown: it left no word of its end; its log: {log}\n")
    assert len(slurm.calls("squeue")) > 2


def test_wait_prints_why_a_run_failed(cli, slurm, submitted):
    made = submitted()
    now(made.attempt(outcome="failed", why="rank 1 was killed by SIGKILL\nits log: [b]x[/b]"))
    slurm.scene(row("12", "FAILED"))
    ended = cli("wait", "12")
    assert (ended.status, ended.out) == (2, "12 a: FAILED: rank 1 was killed by SIGKILL\nits log: [b]x[/b]\n")


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
    assert (ended.status, ended.out.splitlines()) == (status, [*failed, f"13 v: {verdict}: {verdict}: in a line"])


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
    assert [line.split(":")[0] for line in ended.out.splitlines()] == ["12 a", "15 v"]


def test_wait_no_longer_than_it_may(cli, slurm, submitted):
    submitted()
    slurm.scene(row("12", "PENDING", "Priority"))
    ended = cli("wait", "12", "--timeout", "0.2")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.endswith("error: not ended after 0.2 s:\n  12 a: PENDING (Priority)\n")


def test_a_controller_that_is_away_for_a_while_does_not_end_a_wait(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "RUNNING"))
    slurm.scene(away=True)
    slurm.scene(away=True)
    slurm.scene(before=made.attempt(outcome="completed"))
    ended = cli("wait", "12")
    assert ended.status == 0
    assert ended.err.count("no answer, asking again and again: ") == 1


def test_a_controller_that_is_away_at_first_is_an_error(cli, slurm, submitted):
    submitted()
    slurm.scene(away=True)
    ended = cli("wait", "12")
    assert (ended.status, ended.out) == (2, "")
    assert "Unable to contact slurm controller" in ended.err


def test_the_controller_is_asked_less_and_less_often(slurm, submitted, monkeypatch):
    made = submitted()
    clock = [0.0]
    asked = []
    monkeypatch.setattr(follow, "FIRST_PAUSE", 2.0)
    monkeypatch.setattr(follow, "LONGEST_PAUSE", 15.0)
    monkeypatch.setattr(follow.time, "monotonic", lambda: clock[0])
    slurm.scene(row("12", "PENDING"))
    for _ in range(14):
        slurm.scene(row("12", "RUNNING"))
    slurm.scene(before=made.attempt(outcome="completed"))
    watch = follow.SubmissionWatch(registry.find(["12"]), lambda line: None)
    while True:
        before = len(slurm.calls("squeue"))
        over = watch()
        if len(slurm.calls("squeue")) > before:
            asked.append(clock[0])
        if over:
            break
        clock[0] += 0.25
    pauses = [b - a for a, b in pairwise(asked)]
    assert pauses[:3] == [2.0, 2.0, 2.5]  # after the start of the job as at first
    assert pauses == sorted(pauses)
    assert pauses[-1] == 15.0


# tpi logs


def test_logs_are_what_the_job_printed(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "RUNNING"))
    now(made.put(made.directory / "logs" / "job-12.log", "step 1/20  loss [4]\n\\x1b no line end"))
    now(made.put(made.directory / "logs" / "rank-1.log", "of a rank\n"))
    assert cli("logs", "12").out == "step 1/20  loss [4]\n\\x1b no line end"
    assert cli("logs", "12", "--rank", "1").out == "of a rank\n"
    assert slurm.calls("squeue") == []
    ended = cli("logs", "12", "--rank", "7")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        f"error: {made.directory}/logs/rank-7.log is not there yet; -f waits for it",
        "logs of ranks that are there: rank-1.log",
        "12: RUNNING",
    ]


def test_logs_of_a_verify_are_those_of_its_cells_and_the_judge(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    for job, text in {"12_0": "one\n", "12_1": "two\n", "13": "identical\n"}.items():
        now(made.put(made.directory / "logs" / f"job-{job}.log", text))
    now(made.put(made.directory / "tp2" / "logs" / "rank-0.log", "of a rank\n"))
    assert cli("logs", "v").out == "==> v/tp1 <==\none\n\n==> v/tp2 <==\ntwo\n\n==> v <==\nidentical\n"
    assert cli("logs", "v", "--cell", "tp2").out == cli("logs", "12_1").out == "two\n"
    assert cli("logs", "v", "--cell", "tp2", "--rank", "0").out == "of a rank\n"
    for log in (made.directory / "logs").iterdir():
        log.unlink()
    slurm.scene(row("12_[0-1]", "PENDING"), row("13", "PENDING", "Dependency"))
    assert cli("logs", "v").err.splitlines() == [
        "error: no log of v is there yet; -f waits for it",
        "logs of ranks that are there: rank-0.log",
        "12_0: PENDING",
        "12_1: PENDING",
        "13: PENDING (Dependency)",
    ]
    assert "error: --rank 0 of which run? say --cell NAME: tp1, tp2" in cli("logs", "v", "--rank", "0").err
    assert "error: v has no cell tp3; did you mean 'tp2'?" in cli("logs", "v", "--cell", "tp3").err


def test_logs_of_a_run_have_no_cells(cli, submitted):
    submitted()
    assert cli("logs", "a", "--cell", "tp1").err == "error: a has no cell tp1; it is no tpi submit --verify\n"


def test_logs_of_a_job_that_waits_say_why(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "PENDING", "Resources"))
    ended = cli("logs", "12")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        f"error: {made.directory}/logs/job-12.log is not there yet; -f waits for it",
        "12: PENDING (Resources)",
    ]


def test_following_goes_on_over_a_requeue_and_ends_with_the_job(cli, slurm, submitted):
    made = submitted()
    log = made.directory / "logs" / "job-12.log"
    slurm.scene(row("12", "PENDING", "Resources"))
    slurm.scene(row("12", "RUNNING"), before=made.put(log, "one\n"))
    slurm.scene(row("12", "PENDING", "BeginTime"), before=made.attempt(outcome="stopped", requeued=True))
    slurm.scene(row("12", "RUNNING"), before=f"echo two >>{log}; printf th >>{log}")
    slurm.scene(row("12", "RUNNING"), before=f"printf 'ree\\nlast' >>{log}")
    slurm.scene(before=made.attempt(outcome="failed", why="no room", job={"id": "12", "restart": 1, "nodes": []}))
    ended = cli("logs", "-f", "12")
    assert (ended.status, ended.out) == (2, "one\ntwo\nthree\nlast")
    assert ended.err.splitlines() == [
        "[12 a: PENDING (Resources)]",
        "[12 a: RUNNING on n1]",
        "[12 a: PENDING (BeginTime)]",
        "[12 a: RUNNING on n1]",
        "12 a: failed: no room",
    ]


def test_following_one_cell_ends_with_it(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    now(made.put(made.directory / "logs" / "job-12_0.log", "one\n"))
    slurm.scene(row("12_0", "RUNNING"), row("12_1", "RUNNING"), row("13", "PENDING"))
    slurm.scene(row("12_1", "RUNNING"), row("13", "PENDING"), before=made.attempt("tp1", outcome="completed"))
    ended = cli("logs", "-f", "v", "--cell", "tp1")
    assert (ended.status, ended.out) == (0, "one\n")


def test_ctrl_c_ends_the_following_and_not_the_job(cli, slurm, submitted, monkeypatch):
    submitted()
    slurm.scene(row("12", "RUNNING"))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.time, "sleep", interrupt)
    assert cli("logs", "-f", "12").status == 130
    assert cli("wait", "12").status == 130
    assert slurm.calls("scancel") == []


def test_a_file_that_was_replaced_or_cut_is_begun_anew(tmp_path):
    file, out = tmp_path / "log", io.BytesIO()
    tails = Tails([Source("a", file)], out)
    assert not tails()
    for text, written in (("one\ntw", b"one\n"), ("one\ntwo\n", b"two\n"), ("new\n", b"new\n")):
        file.write_text(text)
        assert tails()
        assert out.getvalue() == written
        assert not tails()
        out.seek(0)
        out.truncate()
    other = tmp_path / "other"
    other.write_text("longer than before\n")
    other.replace(file)
    assert tails()
    assert out.getvalue() == b"longer than before\n"


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
        "12_1 v/tp2: cancelled (was RUNNING)",
        "12_2 v/tp4: cancelled (was PENDING (Resources))",
        "13 v: cancelled (was PENDING (Dependency))",
        "a run that can save in time does; go on with it:",
        f"  sbatch --array=1 {made.directory}/job.sbatch",
    ]


def test_cancel_one_task_leaves_the_others(cli, slurm, submitted):
    submitted("v", cells=("tp1", "tp2"))
    slurm.scene(row("12_[0-1]", "PENDING"), row("13", "PENDING", "Dependency"))
    assert cli("cancel", "12_1").out == "12_1 v/tp2: cancelled (was PENDING)\n"
    assert slurm.calls("scancel") == ["12_1"]


def test_cancel_of_a_job_that_has_ended_is_no_mistake(cli, slurm, submitted):
    now(submitted().attempt(outcome="completed"))
    slurm.scene()
    ended = cli("cancel", "12")
    assert (ended.status, ended.out) == (0, "12 a: has ended already: completed\n")
    assert slurm.calls("scancel") == []
