# SPDX-License-Identifier: Apache-2.0
"""SLURM's commands as functions. No other module runs them, except srun. This module is independent of runs."""

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_invariant_recipes.check.hosts.job import parse_time
from tp_invariant_recipes.errors import RunError, reason

TIMEOUT = 60.0  # seconds that a command may take
MARK = "tpi|"  # at the beginning of each row that a command prints for us

# States in which a job never runs again. COMPLETING is not one of them: a requeued job passes through it.
OVER = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
)


@dataclass(frozen=True)
class Queued:
    """A job, or a task of an array, that the controller remembers. It forgets ended ones after minutes.

    state:        SLURM's word: "PENDING", "RUNNING", "COMPLETED", …
    reason:       SLURM's reason why it waits or ended; "None" without one.
    seconds_remaining: of its time limit; None: no limit, or it does not run.
    nodes:        the nodes that it runs on or ran on last, in SLURM's form: "n[1-3],m5".
    """

    state: str
    reason: str = "None"
    seconds_remaining: int | None = None
    nodes: str = ""

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in OVER


@dataclass(frozen=True)
class Partition:
    """nodes: their number. seconds: the longest time limit; None: no limit."""

    name: str
    default: bool
    nodes: int
    seconds: int | None


# Pattern in SLURM's standard error -> the remedy. tpi shows the first matching row, with SLURM's own line.
ADVICE = (
    (r"s_p_parse_file|cannot stat file|configuration (source|file)|fetch_config|ClusterName needs to be specified",
     "SLURM's configuration cannot be read: {conf}; export SLURM_CONF=/path/to/slurm.conf, as your cluster has it"),
    (r"Unable to contact slurm controller|Connection refused|Socket timed out",
     "SLURM's controller does not answer; scontrol ping shows whether it runs. {conf}, which names the controller; "
     "set it if this is the wrong cluster"),
    (r"temporarily unable to accept job",
     "the queue is full for now; submit again when jobs have ended (squeue --me)"),
    (r"invalid account|account/partition combination",
     "slurm.account=NAME, slurm.partition=NAME: sacctmgr show associations user=$USER lists what you may use"),
    (r"invalid qos", "slurm.qos=NAME: sacctmgr show qos lists them"),
    (r"invalid partition", "slurm.partition=NAME: sinfo --summarize lists them"),
    (r"time limit is invalid|Invalid --time", "slurm.time=TIME: sinfo --format='%P %l' shows each partition's limit"),
    (r"node count|more processors than permitted|node configuration is not available",
     "fewer ranks, or another slurm.partition: sinfo --Node --long shows the nodes"),
    (r"MaxJobCount|MaxSubmit|accounting/QOS policy|QOSMax|Too many",
     "a limit on jobs is reached; submit again when jobs have ended, or use another slurm.qos"),
    (r"MaxArraySize|invalid job array", "the array has more tasks than this cluster takes; give keys fewer values"),
    (r"dependency problem", "the job that it waits for is gone"),
    (r"Access/permission denied|Permission denied", "it is somebody else's, or closed to your group"),
)  # fmt: skip

NOT_INSTALLED = (
    "SLURM is not installed here: {command} is not on PATH; use a login node of your cluster, or try it with a "
    "throw-away one: scripts/slurm-cluster"
)


def sbatch(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a script; returns the id of its job.

    options: in addition to the script's. The job gets this process's environment.

    Raises RunError.
    """
    out = _run(["sbatch", "--parsable", *options, str(script)], _script_environment(script))
    ids = [match[1] for line in out.splitlines() if (match := re.fullmatch(r"(\d+)(;\S+)?\s*", line, re.ASCII))]
    if not ids:
        raise RunError(
            f"sbatch printed no job id, but {out[:200]!r}; look with squeue --me before you repeat the command"
        )
    return ids[-1]


def queue() -> dict[str, Queued]:
    """Return this user's jobs by their ids: "12", or "12_0" for an array's task.

    It includes ended jobs as long as the controller remembers them. Raises RunError when SLURM is not installed or does
    not answer.
    """
    rows = _rows(["squeue", "--noheader", "--me", "--array", "--states=all"], "%F|%K|%T|%L|%N|%r", 6)
    return {
        job if task == "N/A" else f"{job}_{task}": Queued(
            state, reason, _seconds(remaining) if state == "RUNNING" else None, nodes
        )
        for job, task, state, remaining, nodes, reason in rows
    }


def accounting(jobs: Iterable[str]) -> dict[str, str]:
    """Return the states of these jobs, as in `Queued`, by "12" or, for an array's task, "12_0".

    Empty if SLURM keeps no accounts.
    """
    ids = ",".join(jobs)
    if not ids:
        return {}
    options = ["--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={ids}"]
    try:
        lines = _run(["sacct", *options]).splitlines()
    except RunError:  # without accounts, the run directory still shows how a run ended
        return {}
    accounts: dict[str, str] = {}
    for job, task, state in (match.groups() for line in lines if (match := _ACCOUNT.fullmatch(line))):
        accounts |= dict.fromkeys([f"{job}_{number}" for number in _tasks(task)] if task else [job], state)
    return accounts


# Of sacct: job, or a task or several of an array that were cancelled while they waited; "CANCELLED by 1000".
_ACCOUNT = re.compile(r"(\d+)(?:_(\d+|\[[\d,%-]+\]))?\|([A-Z_]+)[^|]*", re.ASCII)


def _tasks(listed: str) -> list[int]:
    """Return the tasks that SLURM lists as "3" or "[0,2-4%2]"."""
    spans = [span.split("-") for span in listed.strip("[]").partition("%")[0].split(",")]
    return [task for span in spans for task in range(int(span[0]), int(span[-1]) + 1)]


def cancel(jobs: Iterable[str]) -> None:
    """End these jobs, running or waiting. A job that has ended already is no error. Raises RunError."""
    for job in jobs:  # one by one: a forgotten id must not keep the others alive
        _run(["scancel", job], forgotten=True)


def partitions() -> list[Partition]:
    """All partitions. Raises RunError when SLURM is not installed or does not answer."""
    return [  # nodes: allocated/idle/other/total
        Partition(name.removesuffix("*"), name.endswith("*"), int(nodes.rpartition("/")[2]), _seconds(limit))
        for name, nodes, limit in _rows(["sinfo", "--noheader", "--summarize"], "%P|%F|%l", 3)
    ]


def _rows(command: Sequence[str], columns: str, count: int) -> list[list[str]]:
    """Return the rows that a command prints in these columns. Raises RunError.

    Each row begins with MARK, since sites print notices on standard output as well.
    """
    lines = _run([*command, f"--format={MARK}{columns}"]).splitlines()
    rows = [line.removeprefix(MARK).split("|", count - 1) for line in lines if line.startswith(MARK)]
    if torn := next((row for row in rows if len(row) != count), None):
        raise RunError(f"{command[0]} printed {'|'.join(torn)[:200]!r}, which is not of the columns {columns}")
    return rows


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None, *, forgotten: bool = False) -> str:
    """Return standard output. Raises RunError.

    forgotten: an id that the controller no longer knows, or never knew, gives an empty answer instead of an error.
    """
    try:
        ended = subprocess.run(
            command, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT
        )
    except FileNotFoundError:
        raise RunError(NOT_INSTALLED.format(command=command[0])) from None
    except OSError as error:
        raise RunError(f"{command[0]} cannot be started: {reason(error)}") from error
    except subprocess.TimeoutExpired as late:  # sbatch tries for minutes while the queue is full, and says so
        if stderr := (late.stderr or b"").decode(errors="replace").strip():
            raise RunError(_error_message(command[0], stderr, None)) from None
        raise RunError(
            f"{command[0]} gave no answer in {TIMEOUT:.0f} s; look with squeue --me before you repeat the command"
        ) from None
    if ended.returncode == 0 or (forgotten and "Invalid job id specified" in ended.stderr):
        return ended.stdout
    raise RunError(_error_message(command[0], ended.stderr, ended.returncode))


def _error_message(command: str, stderr: str, status: int | None) -> str:
    """SLURM's own message, and the remedy."""
    words = [re.sub(rf"^{command}: (error: )?", "", line) for line in stderr.splitlines() if line.strip()]
    own = "; ".join(dict.fromkeys(words)) or f"exit status {status}, without a word"
    advice = next((text for pattern, text in ADVICE if re.search(pattern, stderr, re.IGNORECASE)), None)
    conf = os.environ.get("SLURM_CONF")
    source = f"SLURM_CONF is {conf}" if conf else "SLURM_CONF is not set, so SLURM reads its default slurm.conf"
    return f"{command}: {own}" + (f"\n{advice.replace('{conf}', source)}" if advice else "")


def _seconds(text: str) -> int | None:
    """Return the seconds of a duration as squeue and sinfo print it; None for UNLIMITED, infinite, INVALID, NOT_SET."""
    return parse_time(text) if text[:1].isdigit() else None


# Options whose variable has a different name.
_VARIABLES = {"time": "TIMELIMIT", "array": "ARRAY_INX"}
# Variables of an allocation that stay: they give SLURM's location and the user's identity.
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")


def _script_environment(script: Path) -> dict[str, str]:
    """Return this process's environment without variables that would turn this script into another job.

    For sbatch a variable such as SBATCH_PARTITION overrides the script. Inside another job, variables like
    SLURM_MEM_PER_NODE would pass on to the new job.
    """
    options = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    stated = {"SBATCH_" + _VARIABLES.get(name, name.upper().replace("-", "_")) for name in options}
    outer = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if name not in stated
        and name not in ("SBATCH_WAIT", "SBATCH_TEST_ONLY")
        and not (outer and name.startswith("SLURM_") and name not in _KEPT_VARIABLES)
    }
