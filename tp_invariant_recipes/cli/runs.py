# SPDX-License-Identifier: Apache-2.0
"""`tpi runs`, `tpi jobs`, `tpi logs`, `tpi cancel` and `tpi wait`."""

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tp_invariant_recipes.cli import output
from tp_invariant_recipes.cli.arguments import Json, argument, flag
from tp_invariant_recipes.cli.output import Line
from tp_invariant_recipes.machine import terminal
from tp_invariant_recipes.text import plural, single_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_invariant_recipes.jobs.states import JobState
    from tp_invariant_recipes.runs.overview import RunRow

_JOB_COLOURS = {0: "green", 1: "red", 2: "yellow", None: ""}  # by exit status; None: it has not ended
_JOB_HEAD = ("job", "run", "state", "step", "loss", "time left")
_HELP = "Id of a job, name of a run (the last part of its directory), or run directory."
Job = Annotated[str, argument("JOB", _HELP)]
Jobs = Annotated[list[str], argument("JOB", _HELP)]
MaybeJobs = Annotated[list[str] | None, argument("JOB", _HELP)]


def jobs(
    names: MaybeJobs = None,
    everything: Annotated[bool, flag("Also list jobs that ended more than a day ago.", "--all")] = False,
    as_json: Json = False,
) -> None:
    """List the jobs of `tpi submit`: queued, or ended within a day.

    States come from SLURM as long as it knows a job, then from the run directory; steps and losses always come from the
    run directory. If SLURM does not answer, tpi prints a warning and "unknown" for SLURM's own facts; the exit status
    is still 0.

    \b
    tpi jobs
    tpi jobs 12 qwen3_8b-tp4-20260101-120000
    tpi jobs --json | jq '.jobs[] | select(.alive)'

    --json prints schema (1), warning (why SLURM did not answer, or null) and jobs, with one entry for each job or task
    of an array: job (the id), role (train, cell, judge), run, directory, log, state, reason (why it is pending), alive
    (null: not known), exit_status (as of `tpi wait`; null: not ended), tries, step, of, loss, seconds_left (of the
    time limit), nodes (as SLURM writes them), note.
    """
    from tp_invariant_recipes.jobs import states
    from tp_invariant_recipes.jobs.registry import find

    rows, unavailable = states.overview(find(names) if names else None, everything=everything)
    if as_json:
        terminal.print_json({"schema": 1, "warning": unavailable, "jobs": [state.as_dict() for state in rows]})
        return
    if unavailable:
        _print_status(f"warning: SLURM was not asked: {unavailable}")
    if not rows:
        recent = "none in the queue or ended within a day; --all lists all"
        terminal.print_text("no job was submitted yet" if everything else recent)
        return
    output.show(_JOB_HEAD, list(map(_job_line, rows)), numeric=_JOB_HEAD[-3:], coloured="state")
    for state in [state for state in rows if state.note] if names else []:
        terminal.print_line(terminal.console(), f"{state.part.id} {state.part.name}: {state.note}", "dim")


def logs(
    name: Job,
    following: Annotated[bool, flag("Follow the output until the job ends.", "-f", "--follow")] = False,
) -> None:
    """Print a job's output: steps, losses, and reasons of failures.

    For a verify, tpi prints the output of all its jobs; `tpi jobs` lists their ids. With -f it waits for a pending job,
    stays when SLURM requeues the job, and ends with the job and with the exit status of `tpi wait`. Ctrl-C stops
    following; the job continues. Ranks have logs of their own: RUN/logs/rank-N.log.

    \b
    tpi logs -f 12
    tpi logs 13_1
    """
    from tp_invariant_recipes.jobs import states
    from tp_invariant_recipes.jobs.registry import find

    (submission,) = find([name])
    if not following:
        states.show(submission, sys.stdout.buffer)
        return
    ended = states.follow(submission, sys.stdout.buffer, lambda line: _print_status(f"[{line}]"), terminal.reader_gone)
    if ended is not None:
        _print_status(_closing(ended))
        _exit([ended])


def cancel(names: Jobs) -> None:
    """End running or pending jobs.

    For a verify, tpi ends the jobs of all configurations and the job that compares them. SLURM asks a job to end, and
    kills it after its KillWait (30 s by default). A run that can save a checkpoint in that time does so, and --resume
    can continue it.

    \b
    tpi cancel 12
    tpi cancel 12_1 qwen3_8b-tp4-20260101-120000
    """
    from tp_invariant_recipes.errors import RunError
    from tp_invariant_recipes.jobs.registry import find
    from tp_invariant_recipes.jobs.states import UNKNOWN, cancel
    from tp_invariant_recipes.runs.run_dir import RunDir

    before = cancel(find(names))
    lost = [state.part.id for state in before if state.word == UNKNOWN]
    for state in before:
        words = f"cancelled (was {state.text})" if state.alive else f"has ended already: {state.text}"
        if state.part.id not in lost:
            terminal.print_text(f"{state.part.id} {state.part.name}: {words}")
    started = [state for state in before if state.alive and state.step is not None]
    if started:
        terminal.print_text("a run that can save in time does; continue it:")
    for state in started:
        task = [] if state.part.task is None else [f"--array={state.part.task}"]
        terminal.print_text(f"  {shlex.join(['sbatch', *task, str(RunDir(state.part.directory).script)])}")
    if lost:
        raise RunError(
            f"SLURM does not know {', '.join(lost)}, and no run recorded an end: squeue --me lists your jobs"
        )


def wait(names: Jobs) -> None:
    """Wait until jobs have ended, and report their results.

    A requeued job has not ended. Exit status: 0 the run completed, or all configurations of the verify are identical; 1
    the verify detected a difference; 2 a run failed, was cancelled or left no report. With several jobs it is the
    highest.

    \b
    tpi wait 12 && tpi report runs/a
    timeout 3600 tpi wait 12 13
    tpi wait $(tpi submit qwen3_8b tp=4 cluster=h100 slurm.time=1:00:00)
    """
    from tp_invariant_recipes.jobs.registry import find
    from tp_invariant_recipes.jobs.states import watch

    *_, ended = watch(find(names), _print_status)
    for states in ended:
        terminal.print_text(_closing(states))
    _exit(ended)


def _exit(submissions: "Sequence[Sequence[JobState]]") -> None:
    from tp_invariant_recipes.jobs.states import exit_status

    raise typer.Exit(max(exit_status(states) or 0 for states in submissions))


def _closing(states: "Sequence[JobState]") -> str:
    """How a submission ended: the verdict if there is one, and every failure."""
    from tp_invariant_recipes.jobs.registry import JUDGE

    failed = [state for state in states if state.exit_status == 2]
    shown = [state for state in states if state.part.role == JUDGE] or states
    number = states[0].part.job  # what tpi submit has printed; a judge has another id
    return "\n".join(_ending(state, number) for state in states if state in shown or state in failed)


def _ending(state: "JobState", number: str) -> str:
    figures = "" if state.loss is None else f", loss {state.loss:.4f}"
    at = "" if state.step is None else f" at step {_steps(state)}{figures}"
    note = f": {state.note}" if state.note else ""
    if state.note and state.note.startswith(f"{state.word}: "):  # a verdict begins with its word
        at, note = "", state.note.removeprefix(state.word)
    id_ = number if state.part.task is None else state.part.id
    return f"{id_} {state.part.name}: {state.spelt}{at}{note}"


def _job_line(row: "JobState") -> Line:
    cells = (
        row.part.id,
        row.part.name + (" (judge)" if row.part.role == "judge" else ""),
        row.text,
        _steps(row),
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.seconds_remaining is None else _clock(row.seconds_remaining),
    )
    return Line(
        cells, _JOB_COLOURS[row.exit_status], row.note.splitlines()[0] if row.exit_status == 2 and row.note else ""
    )


def _steps(state: "JobState") -> str:
    if state.step is None:
        return ""
    return f"{state.step}" if state.last_step is None else f"{state.step} of {state.last_step}"


def _clock(seconds: int) -> str:
    """As SLURM writes it: 1-02:03:04."""
    minutes, hours, days = seconds // 60 % 60, seconds // 3600 % 24, seconds // 86400
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{seconds % 60:02}"


def _print_status(text: str) -> None:
    terminal.print_line(terminal.console(stderr=True), text)


_COLOURS = {"completed": "green", "failed": "red", "damaged": "red", "killed": "yellow", "stopped": "yellow"}
_HEAD = ("run", "state", "step", "loss", "layout", "model", "numerics", "fingerprint")


def runs(
    folder: Annotated[Path, argument("FOLDER", "Where to look; default runs.", show_default=True)] = Path("runs"),
    every: Annotated[bool, flag("Also list the runs that commands made for themselves.", "--all")] = False,
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, layout.

    The run that was started or restarted latest comes last. Runs with the same fingerprint are comparable:
    they have the same model, data, optimizer and seed. States: running; completed; stopped (Ctrl-C or
    SIGTERM); failed; killed (it recorded no exit status); not started (submitted); damaged, with the reason. Exit
    status: 0, whatever the states; 2 there is no such folder.

    Runs that verify, bench, bisect and audit made for themselves are hidden without --all, unless FOLDER is
    the directory of such a command.

    \b
    tpi runs
    tpi runs --all
    tpi runs /scratch/me --json | jq '.runs[] | select(.state == "failed")'
    """
    from tp_invariant_recipes.runs import overview

    where = folder.expanduser()
    to_person = terminal.console(stderr=True)
    with to_person.status(f"looking for runs below {where}") if to_person.is_terminal else nullcontext():
        there = overview.rows(where)
    shown = [row for row in there if every or not row.own or where in (row.run, row.run.parent)]
    hidden = len(there) - len(shown)
    if as_json:
        terminal.print_json({"schema": 1, "runs": [row.as_dict() for row in shown], "hidden": hidden})
        return
    if shown:
        output.show(_HEAD, list(map(_line, shown)), numeric=("step", "loss"), coloured="state")
    else:
        terminal.print_text(f"no run below {single_line(str(where))}")
    if hidden:
        to_person.print(f"hidden: {plural(hidden, 'run')} of {', '.join(overview.MAKERS)}; tpi runs --all lists them")


def _line(row: "RunRow") -> Line:
    from tp_invariant_recipes.ledger.bits import readable

    seen, of = row.as_dict(), "" if row.last.to_step is None else f"/{row.last.to_step}"
    layout = seen["layout"] or {}
    degrees = " ".join(f"{name}={layout[name]}" for name in layout if name == "tp" or layout[name] > 1)
    cells = (
        str(row.run),
        row.state,
        "" if row.step is None or row.record is None else f"{row.step}{of}",
        "" if row.loss is None else str(readable(row.loss)),
        degrees,
        seen["model"] or "",
        seen["numerics"] or "",
        (seen["identity_hash"] or "")[:8],
    )
    # The first line of a reason; with the second where the first only introduces it.
    first, *more = list(filter(None, map(str.strip, (row.why or "").splitlines()))) or [""]
    return Line(cells, _COLOURS.get(row.state, ""), f"{first} {more[0]}" if first.endswith(":") and more else first)
