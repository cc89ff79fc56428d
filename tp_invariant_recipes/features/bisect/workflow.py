# SPDX-License-Identifier: Apache-2.0
"""`tpi bisect`: two runs differ at a step; train that step again with traces, and name the operation.

Both runs train again from their last checkpoint before the step, or from the start, and stop after it. That step traces
every module. A third pair of trainings dumps the first differing tensor and its operands.
"""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from tp_invariant_recipes.comparison.compare import Comparison, Verdict, compare
from tp_invariant_recipes.comparison.explanation import is_packed, run_name
from tp_invariant_recipes.comparison.magnitude import magnitude_line
from tp_invariant_recipes.comparison.text import verdict_line
from tp_invariant_recipes.errors import ConfigError, Interrupted, LedgerError, RunError, TpiError
from tp_invariant_recipes.features.bisect import recompute
from tp_invariant_recipes.features.bisect.result import (
    BisectResult,
    NothingToTrain,
    distances,
    module_of,
    operation,
    worth_dumping,
)
from tp_invariant_recipes.launch import local, resume, train
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.reader import Ledger, contents
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import RunDir, choose_for_several
from tp_invariant_recipes.settings import environment

SIDES = ("a", "b")
# The variables of a run's recorded environment that belong to the machine; they keep this machine's values.
MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "*_DIR")


@dataclass(frozen=True)
class Rerun:
    """A run to be trained again up to a step. environment: of its training.

    copied: the lines of its ledger that the new ledger starts with.
    """

    original: Ledger
    plan: Plan
    copied: bytes
    environment: dict[str, str]


@dataclass(frozen=True)
class Bisection:
    """Two runs that first differ at a step, and how to train it again. directory: holds all files written."""

    first: Comparison
    directory: RunDir
    step: int
    remarks: tuple[str, ...]
    referee: bool = False


def new(a: Path, b: Path, directory: Path | None, *, referee: bool = False) -> Bisection | NothingToTrain:
    """Compare two run directories.

    referee: whether to say which run is right. Raises LedgerError or RunError: a path or `directory` is not usable.
    """
    ledgers = [read(path) for path in (a, b)]
    if lacking := [ledger.path for ledger in ledgers if not _can_be_trained(ledger)]:
        named = ", ".join(map(str, lacking))
        raise LedgerError(f"{named}: to train a step again takes the run directory, with run.json and config.yaml")
    comparison = compare(*ledgers)
    if comparison.verdict is Verdict.NOT_COMPARABLE:
        raise LedgerError(verdict_line(comparison))
    first = comparison.first
    if first is None or first.step == 0 or first.phase in ("data", "evaluation"):  # no step shows these
        return NothingToTrain(comparison)
    if is_packed(comparison.a):
        compared = f"tpi compare --all {shlex.join(map(str, (a, b)))}"
        raise LedgerError(f"rows of packed sequences have no trace; {compared} lists the parameters that differ")
    where = RunDir(choose_for_several(directory, "bisect"))
    lines = []
    now = versions()
    now.pop("git_commit", None)  # most commits do not change computations
    for ledger in (comparison.a, comparison.b):
        then = ledger.header.versions
        other = [
            f"{name} {then[name]} then and {now[name]} now" for name in now if name in then and then[name] != now[name]
        ]
        if other:
            lines.append(f"{run_name(ledger)} was recorded with other versions: {', '.join(other)}")
    remarks = (*lines, *_other_layouts(ledgers))
    return Bisection(comparison, where, first.step, remarks, referee)


def plans(
    bisection: Bisection, name: str, step: int, equal_until: int, dump: tuple[str, ...] = (), since: int | None = None
) -> list[Rerun]:
    """Both runs again up to `step`, in `DIRECTORY/name-a` and `-b`. Raises RunError that lists why they cannot run.

    since: the first step that is traced; None: `step`.
    equal_until: the last step after which both are known to be in the same state; they start at it or before.
    """
    problems: list[str] = []
    made = []
    for side, ledger in zip(SIDES, (bisection.first.a, bisection.first.b), strict=True):
        run_dir = RunDir(bisection.directory.path / f"{name}-{side}")
        try:
            made.append(_rerun(ledger, run_dir, (since or step, step), equal_until, dump))
        except TpiError as error:
            wrong = error.problems if isinstance(error, ConfigError) else (str(error),)
            problems += (problem for problem in wrong if problem not in problems)
    if problems:
        raise RunError("\n".join(problems))
    return made


def execute(bisection: Bisection, watch: Watch) -> BisectResult:
    """Train, compare, and write `bisect.json`. watch: as for `tpi verify`. Raises a TpiError."""
    try:
        equal_until, both = _planned(bisection)
        with locked_empty(bisection.directory):
            result = _bisected(bisection, watch, equal_until, both)
            if bisection.referee:
                result = _refereed(bisection, watch, equal_until, result)
            bisection.directory.write(bisection.directory.path / "bisect.json", result.as_json())
    except KeyboardInterrupt:
        raise Interrupted(_stopped(bisection.directory.path)) from None
    return result


def _planned(bisection: Bisection) -> tuple[int, list[Rerun]]:
    """Return the last step after which both runs are known to agree, and both again from there. It writes nothing."""
    equal_until = min(bisection.step - 1, _last_equal((bisection.first.a, bisection.first.b), bisection.step))
    both = plans(bisection, "traced", bisection.step, equal_until)
    for rerun in both:
        with _environment(rerun.environment):
            train.check(rerun.plan)
    return equal_until, both


def _bisected(bisection: Bisection, watch: Watch, equal_until: int, both: list[Rerun]) -> BisectResult:
    originals = (bisection.first.a, bisection.first.b)
    remarks = list(bisection.remarks)
    step = bisection.step
    if equal_until < step - 1:
        remarks.append(f"not both recorded digests at every step: known to agree up to step {equal_until}")
    while True:
        traced = [_train(rerun, step, watch, remarks) for rerun in both]
        repeats = [compare(*pair, repetition=True) for pair in zip(originals, traced, strict=True)]
        repeating = all(repeated.verdict is Verdict.IDENTICAL for repeated in repeats)
        placed = compare(*traced)
        if not repeating or placed.first is None or not 0 < placed.first.step < step:
            break
        # They first differ at a step without recorded digests: trace that step.
        step = placed.first.step
        equal_until = step - 1
        both = plans(bisection, f"traced-step-{step}", step, equal_until)
    dump = worth_dumping(placed) if placed.first and placed.first.step == step else ()
    dumped_reruns = plans(bisection, "dumped", step, equal_until, dump) if dump else []
    dumped = compare(*(_train(rerun, step, watch, remarks) for rerun in dumped_reruns)) if dump else None
    first = placed.first
    same = dumped is None or first is None or (dumped.first is not None and dumped.first.name == first.name)
    if not same and dumped is not None:
        remarks.append(f"trained once more for the values, they part elsewhere: {verdict_line(dumped)}")
    return BisectResult(
        directory=str(bisection.directory.path),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        runs=tuple(map(run_name, originals)),
        step=step,
        from_steps=tuple(rerun.plan.start for rerun in both),
        traced=tuple(str(rerun.plan.run_dir.path) for rerun in both),
        recorded=bisection.first,
        repeats=tuple(repeated.verdict is Verdict.IDENTICAL for repeated in repeats),
        words=_text(repeats, placed),
        placed=placed,
        module=module_of(placed),
        operation=operation(placed),
        dumped=dump,
        magnitude=magnitude_line(dumped) if dumped and same else None,
        distances=distances(dumped, step, dump) if dumped else {},
        same_place=same,
        remarks=tuple(remarks),
    )


def _refereed(bisection: Bisection, watch: Watch, equal_until: int, result: BisectResult) -> BisectResult:
    """Ask the referee. It may train both runs once more, with dumps of a module's operands and results."""
    before, remarks = min(equal_until, result.step - 2), [*result.remarks]

    def train_dumped(names: tuple[str, ...], since: int) -> list[Path]:
        both = plans(bisection, "refereed", result.step, before, names, since)
        return [_train(rerun, result.step, watch, remarks).path.parent for rerun in both]

    judged = recompute.referee(result.runs, result.repeats, result.module, result.operation, result.step, train_dumped)
    return replace(result, referee=judged, remarks=tuple(remarks))


def _rerun(ledger: Ledger, run_dir: RunDir, steps: tuple[int, int], equal_until: int, dump: tuple[str, ...]) -> Rerun:
    original = RunDir(ledger.path.parent)
    variables = original.read_environment()
    start, config = _start(original, ledger, equal_until), original.read_run_config()
    record = [
        "ledger.digests=1",
        "ledger.state_digests=1",
        f"ledger.trace={steps[0]}:{steps[1]}",
        f"ledger.dump=[{','.join(dump)}]",
        # A trace needs steps that call each module once; no bit changes.
        *("model.cuda_graph_impl=none", *([config.without_overlap] if config.overlaps() else ())),
    ]
    with _environment(variables):
        planned = resume.rerun(original.path, run_dir, start, last_step=steps[1], record=record)
    return Rerun(ledger, planned, _lines(ledger, planned.start), variables)


@contextmanager
def _environment(recorded: dict[str, str]) -> Iterator[None]:
    def of_a_run(variables: Mapping[str, str]) -> dict[str, str]:
        return {k: v for k, v in variables.items() if not any(fnmatchcase(k, pattern) for pattern in MACHINE_VARIABLES)}

    before = dict(os.environ)
    for name in of_a_run(environment.recorded(before)):
        del os.environ[name]
    os.environ.update(of_a_run(recorded))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _last_equal(originals: Sequence[Ledger], step: int) -> int:
    """Return the last step before `step` after which both recorded equal weights (a loss proves none); 0: the start."""
    pairs = zip(*(ledger.steps[: step - 1] for ledger in originals), strict=True)
    digests = ((a.step, ((a.masters, b.masters), (a.weights, b.weights))) for a, b in pairs)
    return max((number for number, both in digests if any(None not in pair for pair in both)), default=0)


def _start(original: RunDir, ledger: Ledger, last: int) -> checkpoints.RunCheckpoint | None:
    """Return the last complete checkpoint up to step `last`; None: from the start. Raises CheckpointError."""
    if not ledger.header.parameters:  # a ledger has digests from its start, and these lines have none
        return None
    own = ledger.header.identity_hash
    for checkpoint in reversed(checkpoints.finished(original.checkpoints)):
        if checkpoint.step <= last and checkpoint.read_manifest().identity_hash == own:
            checkpoint.verify(hashes=False)  # `train.check` reads the files
            return checkpoint
    return None


def _lines(ledger: Ledger, steps: int) -> bytes:
    if not steps:
        return b""
    return b"".join(line + b"\n" for line in contents(ledger.path).split(b"\n")[: steps + 1])


def _train(rerun: Rerun, step: int, watch: Watch, remarks: list[str]) -> Ledger:
    """Return the ledger of the run, up to `step`. Raises RunError: it failed before, or was stopped."""
    from tp_invariant_recipes.features.train import rank

    planned = rerun.plan
    run_dir = planned.run_dir
    if rerun.copied:
        run_dir.path.mkdir(parents=True)
        run_dir.ledger.write_bytes(rerun.copied)
    label = f"{run_dir.path.name}: {run_name(rerun.original)} from step {planned.start}"
    try:
        with _environment(rerun.environment), watch(label, planned) as tick:
            outcome = train.execute(planned, tick, rank_fn=rank.train)
    except RunError as error:  # a diverging run may fail after the step, which does not matter
        if not run_dir.ledger.exists() or len(read(run_dir.ledger).steps) < step:
            raise
        remarks.append(f"{run_dir.path} failed after step {step}: {str(error).splitlines()[0]}")
        outcome = local.Outcome.COMPLETED
    if outcome is local.Outcome.STOPPED:
        raise RunError(_stopped(run_dir.path.parent))
    ledger = read(run_dir.ledger)
    return replace(ledger, steps=ledger.steps[:step])


def _stopped(directory: Path) -> str:
    return f"stopped; what was trained: {directory}"


def _text(repeats: Sequence[Comparison], placed: Comparison) -> str:
    """Return the result in words: first the runs that do not repeat themselves, then the first difference."""
    lines = [
        f"{run_name(repeated.a)} does not repeat itself here: {verdict_line(repeated)}"
        for repeated in repeats
        if repeated.verdict is not Verdict.IDENTICAL
    ]
    if not lines:
        return verdict_line(placed)
    if placed.verdict is Verdict.IDENTICAL:
        return "\n".join([*lines, "trained again, the two do not differ: their difference is not reproducible here"])
    return "\n".join([*lines, f"trained again, the two are {verdict_line(placed)}"])


def _can_be_trained(ledger: Ledger) -> bool:
    where = ledger.run_directory
    return where is not None and RunDir(where).run.is_file() and RunDir(where).config.is_file()


def _other_layouts(ledgers: Sequence[Ledger]) -> list[str]:
    """Run that were resumed with other settings than they began with: only the last are known completely."""
    return [
        f"{run_name(ledger)} went on after step {entry['after_step']} with other {', '.join(sorted(entry['changed']))}"
        f": it is trained again as it was last"
        for ledger in ledgers
        for entry in ledger.header.notes.get("resumed", [])
    ]
