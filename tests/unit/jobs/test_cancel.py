"""`tpi cancel`."""

from tests.unit.jobs.fake_slurm import now, row


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


def test_cancel_one_task_leaves_the_others(cli, slurm, submitted):
    submitted("v", cells=("tp1", "tp2"))
    slurm.scene(row("12_[0-1]", "PENDING"), row("13", "PENDING", "Dependency"))
    assert cli("cancel", "12_1").out == "12_1 v/tp2: cancelled (was pending)\n"
    assert slurm.calls("scancel") == ["12_1"]


def test_cancel_of_a_job_that_has_ended_is_no_mistake(cli, slurm, submitted):
    now(submitted().attempt(outcome="completed"))
    slurm.scene()
    ended = cli("cancel", "12")
    assert (ended.status, ended.out) == (0, "12 a: has ended already: completed\n")
    assert slurm.calls("scancel") == []
