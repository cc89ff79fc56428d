# SPDX-License-Identifier: Apache-2.0
"""`tpi logs`: what is shown, and how it is followed."""

import io

from tests.unit.jobs.fake_slurm import now, row
from tp_invariant_recipes.jobs import states
from tp_invariant_recipes.jobs.registry import TRAIN, JobPart
from tp_invariant_recipes.jobs.states import Tails
from tp_invariant_recipes.runs.run_dir import RunDir


def test_logs_are_what_the_job_printed(cli, slurm, submitted):
    made = submitted()
    slurm.scene(row("12", "RUNNING"))
    now(made.put(made.directory / "logs" / "job-12.log", "step 1/20  loss [4]\n\\x1b no line end"))
    assert cli("logs", "12").out == "step 1/20  loss [4]\n\\x1b no line end"
    assert slurm.calls("squeue") == []
    (made.directory / "logs" / "job-12.log").unlink()
    ended = cli("logs", "12")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        f"error: {made.directory}/logs/job-12.log is not there yet; -f waits for it",
        "12: running",
    ]


def test_logs_of_a_verify_are_those_of_its_cells_and_the_judge(cli, slurm, submitted):
    made = submitted("v", cells=("tp1", "tp2"))
    for job, text in {"12_0": "one\n", "12_1": "two\n", "13": "identical\n"}.items():
        now(made.put(made.directory / "logs" / f"job-{job}.log", text))
    assert cli("logs", "v").out == "==> v/tp1 <==\none\n\n==> v/tp2 <==\ntwo\n\n==> v <==\nidentical\n"
    assert cli("logs", "12_1").out == "two\n"
    for log in (made.directory / "logs").iterdir():
        log.unlink()
    slurm.scene(row("12_0", "PENDING"), row("12_1", "PENDING"), row("13", "PENDING", "Dependency"))
    assert cli("logs", "v").err.splitlines() == [
        "error: no log of v is there yet; -f waits for it",
        "12_0: pending",
        "12_1: pending",
        "13: pending (Dependency)",
    ]


def test_following_goes_on_over_a_requeue_and_ends_with_the_job(cli, slurm, submitted):
    made = submitted()
    log = made.directory / "logs" / "job-12.log"
    slurm.scene(row("12", "PENDING", "Resources"))
    slurm.scene(row("12", "RUNNING"), before=made.put(log, "one\n"))
    slurm.scene(row("12", "PENDING", "BeginTime"), before=made.attempt(outcome="stopped", requeued=True))
    slurm.scene(row("12", "RUNNING"), before=f"echo two >>{log}; printf th >>{log}")
    slurm.scene(row("12", "RUNNING"), before=f"printf 'ree\\nlast' >>{log}")
    slurm.scene(before=made.attempt(outcome="failed", why="no room", job={"id": "12", "restart": 1, "nodes": "n1"}))
    ended = cli("logs", "-f", "12")
    assert (ended.status, ended.out) == (2, "one\ntwo\nthree\nlast")
    assert ended.err.splitlines() == [
        "[12 a: pending (Resources)]",
        "[12 a: running on n1]",
        "[12 a: pending (BeginTime)]",
        "[12 a: running on n1]",
        "12 a: failed: no room",
    ]


def test_ctrl_c_ends_the_following_and_not_the_job(cli, slurm, submitted, monkeypatch):
    submitted()
    slurm.scene(row("12", "RUNNING"))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(states.time, "sleep", interrupt)
    assert cli("logs", "-f", "12").status == 130
    assert cli("wait", "12").status == 130
    assert slurm.calls("scancel") == []


def test_a_file_that_was_replaced_or_cut_is_begun_anew(tmp_path):
    part, out = JobPart("12", None, TRAIN, RunDir(tmp_path), tmp_path), io.BytesIO()
    file, tails = part.log, Tails([part], out)
    file.parent.mkdir()
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
