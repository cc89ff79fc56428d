# SPDX-License-Identifier: Apache-2.0
"""SLURM's commands as functions: what they are asked, what is read out of their answers, what their mistakes become.

The commands are small programs on PATH that answer as SLURM 22.05 does.
"""

import shlex
import time
from collections.abc import Callable

import pytest

from tests.commands_on_path import CommandsOnPath
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.jobs import slurm_client
from tp_invariant_recipes.jobs.slurm_client import Partition, Queued


@pytest.fixture
def commands(tmp_path, monkeypatch) -> CommandsOnPath:
    """Nothing else is on PATH. The file `variables` has the names of a call's variables."""
    commands = CommandsOnPath(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("PATH", str(commands.folder))
    return commands


@pytest.fixture
def command(commands) -> Callable[..., None]:
    """Put a command on PATH: command("squeue", out="…", err="…", status=1)."""

    def put(name: str, out: str = "", err: str = "", status: int = 0, seconds: float = 0) -> None:
        sleep = f"/bin/sleep {seconds}; " if seconds else ""
        said = f"printf %s {shlex.quote(err)} >&2; {sleep}printf %s {shlex.quote(out)}"
        commands.put(name, f"compgen -e >{commands.folder}/variables; {said}; exit {status}")

    return put


NOTICE = "** Maintenance on Monday|12|N/A|RUNNING **\n7 nodes are down\n"
ROWS = """\
tpi|7|N/A|RUNNING|9:56|n1|None
tpi|8|0|PENDING|10:00||Resources
tpi|8|5|RUNNING|1-02:03:04|n[2-3]|None
tpi|9|N/A|RUNNING|UNLIMITED|n1,m4|None
tpi|10|N/A|COMPLETED|9:45|n1|a|b
"""


def test_the_queue_is_read(command):
    command("squeue", NOTICE + ROWS)
    assert slurm_client.queue() == {
        "7": Queued("RUNNING", "None", 596, "n1"),
        "8_0": Queued("PENDING", "Resources"),
        "8_5": Queued("RUNNING", "None", 93784, "n[2-3]"),
        "9": Queued("RUNNING", "None", None, "n1,m4"),
        "10": Queued("COMPLETED", "a|b", None, "n1"),
    }


def test_a_row_that_is_torn_is_an_error(command):
    command("sinfo", "tpi|cpu*|0/")
    with pytest.raises(RunError, match=r"^sinfo printed 'cpu\*\|0/', which is not of the columns"):
        slurm_client.partitions()


def test_the_accounts_are_read(command, commands):
    rows = "7|COMPLETED\n8_0|FAILED\n8_[1,3-4%2]|CANCELLED by 1000\n9|RUNNING\n"
    command("sacct", NOTICE + rows)
    assert slurm_client.accounting(["7", "8", "9"]) == {
        "7": "COMPLETED",
        "8_0": "FAILED",
        **{f"8_{task}": "CANCELLED" for task in (1, 3, 4)},
        "9": "RUNNING",
    }
    assert commands.calls("sacct")[0].endswith(" --jobs=7,8,9")


def test_without_accounts_nothing_is_known(command):
    assert slurm_client.accounting(["7"]) == {}  # no sacct
    command("sacct", err="Slurm accounting storage is disabled\n", status=1)
    assert slurm_client.accounting(["7"]) == {}
    assert slurm_client.accounting([]) == {}


def test_the_partitions_are_read(command):
    rows = "tpi|cpu*|2/1/0/3|1-00:00:00\ntpi|short|0/3/0/3|1:00\ntpi|free|0/1/1/2|infinite\n"
    command("sinfo", NOTICE + rows)
    assert slurm_client.partitions() == [
        Partition("cpu", True, 3, 86400),
        Partition("short", False, 3, 60),
        Partition("free", False, 2, None),
    ]


def test_cancelling_asks_for_each_job_and_forgives_those_that_are_gone(command, commands):
    command("scancel", err="scancel: error: Kill job error on job id 7: Invalid job id specified\n", status=1)
    slurm_client.cancel(["7", "8_0"])
    assert commands.calls("scancel") == ["7", "8_0"]


def test_a_job_of_somebody_else_is_not_cancelled_in_silence(command):
    command("scancel", err="scancel: error: Kill job error on job id 7: Access/permission denied\n", status=1)
    with pytest.raises(RunError, match=r"(?s)job id 7: Access/permission denied\nit is somebody else's"):
        slurm_client.cancel(["7"])


# Submitting


@pytest.fixture
def script(tmp_path):
    """A script that says which partition it wants, and until when."""
    file = tmp_path / "job.sbatch"
    file.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --time=5\n#SBATCH --export=ALL\nsrun x\n")
    return file


@pytest.mark.parametrize("answer", ("12\n", "12;cluster\n", f"{NOTICE}12\n", f"3\n12;cluster\nsee the wiki\n{NOTICE}"))
def test_submitting_gives_the_id(command, commands, script, answer):
    command("sbatch", answer)
    assert slurm_client.sbatch(script, ["--dependency=afterany:7"]) == "12"
    assert commands.calls("sbatch") == [f"--parsable --dependency=afterany:7 {script}"]


def test_an_answer_without_an_id_is_an_error(command, script):
    command("sbatch", NOTICE)
    with pytest.raises(RunError, match=r"^sbatch printed no job id, but '\*\* Maintenance .*; look with squeue --me"):
        slurm_client.sbatch(script, [])


def test_the_script_says_more_than_variables(command, commands, script, monkeypatch):
    command("sbatch", "12\n")
    dropped = ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_EXPORT", "SBATCH_WAIT", "SBATCH_TEST_ONLY")
    kept = ("SBATCH_ACCOUNT", "SLURM_CONF", "SLURM_MEM_PER_NODE", "MY_OWN")
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, "x")
    slurm_client.sbatch(script, [])
    given = (commands.folder / "variables").read_text().split()
    assert [name for name in dropped if name in given] == []
    assert [name for name in kept if name not in given] == []


def test_a_job_submitted_in_a_job_is_not_a_part_of_it(command, commands, script, monkeypatch):
    command("sbatch", "12\n")
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SLURM_NTASKS", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    slurm_client.sbatch(script, [])
    given = (commands.folder / "variables").read_text().split()
    assert [name for name in given if name.startswith("SLURM")] == ["SLURM_CONF"]


# SLURM's words on standard error, and what the message must advise beside them.
MISTAKES = (
    ("invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified",
     "slurm.partition=NAME"),
    ("Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account=NAME"),
    ("Batch job submission failed: Invalid qos specification", "slurm.qos=NAME"),
    ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "slurm.time=TIME"),
    ("Batch job submission failed: Node count specification invalid", "fewer ranks"),
    ("Batch job submission failed: Requested node configuration is not available", "another slurm.partition"),
    ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time "
     "limits)", "a limit on jobs is reached"),
    ("Slurm temporarily unable to accept job, sleeping and retrying", "the queue is full for now"),
    ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "scontrol ping"),
    ("Batch job submission failed: Access/permission denied", "closed to your group"),
    ("Batch job submission failed: Invalid job array specification", "give keys fewer values"),
)  # fmt: skip


def test_a_mistake_is_slurms_words_and_what_to_do(command, script):
    for words, advice in (*MISTAKES, ("lua: no more than 3 coffees", "")):  # the last is in no table
        command("sbatch", err=f"sbatch: error: {words}\n", status=1)
        with pytest.raises(RunError) as raised:
            slurm_client.sbatch(script, [])
        shown, *advised = str(raised.value).splitlines()[-2:]
        assert words.splitlines()[-1].removeprefix("sbatch: error: ") in str(raised.value)
        assert advice in advised[0] if advice else (shown, advised) == ("sbatch: lua: no more than 3 coffees", [])


@pytest.mark.usefixtures("command")
def test_where_slurm_is_not_installed_that_is_reported(script):
    for call in (
        lambda: slurm_client.sbatch(script, []),
        slurm_client.queue,
        slurm_client.partitions,
        lambda: slurm_client.cancel(["7"]),
    ):
        with pytest.raises(
            RunError, match=r"^SLURM is not installed here: \w+ is not on PATH; .*scripts/slurm-cluster"
        ):
            call()


def test_a_queue_that_stays_full_is_not_waited_for(command, script, monkeypatch):
    monkeypatch.setattr(slurm_client, "TIMEOUT", 0.3)
    command("sbatch", err="sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n", seconds=60)
    began = time.monotonic()
    with pytest.raises(RunError, match="the queue is full for now"):
        slurm_client.sbatch(script, [])
    assert time.monotonic() - began < 30


def test_a_command_that_never_answers_is_given_up(command, script, monkeypatch):
    monkeypatch.setattr(slurm_client, "TIMEOUT", 0.3)
    command("sbatch", seconds=60)
    with pytest.raises(RunError, match="look with squeue --me before you repeat"):
        slurm_client.sbatch(script, [])
