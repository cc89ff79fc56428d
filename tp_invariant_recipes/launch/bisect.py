"""The story of `tpi bisect`: two runs differ at a step; train that step again with traces, and name the operation.

Both runs are trained again from their last checkpoint before the step, or from the start, and stop after it. Every
module is traced there. Then the same once more, with the values of the tensors written out that matter.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config.compose import listed
from tp_invariant_recipes.errors import ConfigError, LedgerError, RunError
from tp_invariant_recipes.host.versions import versions
from tp_invariant_recipes.launch import local, plan, train
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.ledger.compare import Comparison, Verdict, compare
from tp_invariant_recipes.ledger.magnitude import magnitude_line, magnitude_report, run_directory
from tp_invariant_recipes.ledger.reader import Ledger, contents, read
from tp_invariant_recipes.ledger.wording import exit_status, one, verdict_line
from tp_invariant_recipes.training import checkpoints
from tp_invariant_recipes.training.rundir import RunDir, choose_for_several

SCHEMA = 1
SIDES = ("a", "b")

Watch = Callable[[str, Plan], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class Again:
    """A run to be trained again up to a step. copied: lines of its ledger that the new one begins with."""

    original: Ledger
    plan: Plan
    copied: bytes


@dataclass(frozen=True)
class Bisection:
    """Two runs that part at a step, and how to train it again. directory: of all that is written."""

    first: Comparison
    directory: RunDir
    step: int
    remarks: tuple[str, ...]


def new(a: Path, b: Path, directory: Path | None) -> Bisection | Comparison:
    """Compare two run directories. Returns the comparison where there is nothing to train again.

    Raises LedgerError or RunError: one is not a run directory, they are of different experiments, or `directory` is
    not empty.
    """
    ledgers = [read(path) for path in (a, b)]
    if lacking := [ledger.path for ledger in ledgers if not _can_be_trained(ledger)]:
        named = ", ".join(map(str, lacking))
        raise LedgerError(f"{named}: to train a step again takes the run directory, with run.json and config.yaml")
    comparison = compare(*ledgers)
    if comparison.verdict is Verdict.NOT_COMPARABLE:
        raise LedgerError(verdict_line(comparison))
    first = comparison.first
    if first is None or first.step == 0 or first.phase == "data":
        return comparison
    where = RunDir(choose_for_several(directory, "bisect"))
    return Bisection(comparison, where, first.step, tuple(_other_versions(comparison)))


def plans(found: Bisection, name: str, dump: tuple[str, ...] = ()) -> list[Again]:
    """Both runs again, in `DIRECTORY/name-a` and `-b`. Raises ConfigError with what keeps either from running here."""
    problems: list[str] = []
    made = []
    for side, ledger in zip(SIDES, (found.first.a, found.first.b), strict=True):
        run_dir = RunDir(found.directory.path / f"{name}-{side}")
        try:
            made.append(_again(ledger, run_dir, found.step, dump))
        except ConfigError as error:
            problems += (problem for problem in error.problems if problem not in problems)
    if problems:
        raise ConfigError(listed(problems), problems)
    return made


def execute(found: Bisection, watch: Watch) -> dict[str, Any]:
    """Train, compare, and return what `bisect.json` then holds. Raises a TpiError when a run cannot be trained again.

    watch: as for `tpi verify`.
    """
    traced = [_train(again, watch) for again in plans(found, "traced")]
    remarks = list(found.remarks)
    for again, ledger in zip((found.first.a, found.first.b), traced, strict=True):
        repeated = compare(again, ledger)
        if repeated.verdict is not Verdict.IDENTICAL:
            remarks.append(f"{_name(again)} does not repeat itself here: {verdict_line(repeated)}")
    placed = compare(*traced)
    if placed.verdict is Verdict.IDENTICAL:
        remarks.append("trained again, the two do not differ: what made them differ is not in their configurations")
    dump = _worth_dumping(placed)
    dumped = compare(*(_train(again, watch) for again in plans(found, "dumped", dump))) if dump else None
    result = _result(found, placed, dumped, dump, remarks)
    found.directory.write(found.directory.path / "bisect.json", result)
    return result


def _again(ledger: Ledger, run_dir: RunDir, step: int, dump: tuple[str, ...]) -> Again:
    original = RunDir(ledger.path.parent)
    start = _start(original, ledger, step)
    record = ["ledger.digests=1", f"ledger.trace={step}:{step}", f"ledger.dump=[{','.join(dump)}]"]
    planned = plan.rerun(original.path, run_dir, start, last_step=step, record=record)
    return Again(ledger, planned, _lines(ledger, planned.start))


def _start(original: RunDir, ledger: Ledger, step: int) -> checkpoints.Checkpoint | None:
    """The last whole checkpoint before the step. None: there is none, or the ledger could not go on from one.

    Raises CheckpointError: it is damaged.
    """
    if not ledger.header.parameters:  # the lines before it have no digests, and a ledger has them from its start
        return None
    own = ledger.header.identity_hash
    for checkpoint in reversed(checkpoints.finished(original.checkpoints)):
        if checkpoint.step < step and checkpoint.read_manifest()["identity_hash"] == own:
            checkpoint.verify()
            return checkpoint
    return None


def _lines(ledger: Ledger, steps: int) -> bytes:
    """The header and so many steps of a ledger, as they are."""
    if not steps:
        return b""
    return b"".join(line + b"\n" for line in contents(ledger.path).split(b"\n")[: steps + 1])


def _train(again: Again, watch: Watch) -> Ledger:
    planned = again.plan
    run_dir = planned.run_dir
    train.check(planned)
    if again.copied:
        run_dir.path.mkdir(parents=True)
        run_dir.ledger.write_bytes(again.copied)
    with watch(f"{run_dir.path.name}: {_name(again.original)} from step {planned.start}", planned) as tick:
        outcome = train.execute(planned, tick)
    if outcome is local.Outcome.STOPPED:
        raise RunError(f"stopped; what was trained: {run_dir.path.parent}")
    return read(run_dir.ledger)


def _worth_dumping(comparison: Comparison) -> tuple[str, ...]:
    """The first differing tensor, and of a module's output the inputs that it was computed from."""
    first = comparison.first
    if first is None or first.kind in ("field", "replicas", "model", "initial") or "#" in first.name:
        return ()
    if first.kind not in ("forward", "backward") or not first.name.rpartition("/")[2].startswith("output"):
        return (first.name,)
    module = first.name.rpartition("/")[0]
    names = (f"{t.direction}/{t.module}/{t.tensor}" for t in comparison.a.steps[first.step - 1].trace or () if t.digest)
    return (first.name, *dict.fromkeys(name for name in names if name.startswith(f"{module}/input")))


def _result(
    found: Bisection, placed: Comparison, dumped: Comparison | None, dump: tuple[str, ...], remarks: list[str]
) -> dict[str, Any]:
    first = placed.first
    return {
        "schema": SCHEMA,
        "exit_status": exit_status([found.first]),
        "directory": str(found.directory.path),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "runs": [str(run_directory(ledger)) for ledger in (found.first.a, found.first.b)],
        "step": found.step,
        "recorded": one(found.first),
        "text": verdict_line(placed),
        "placed": one(placed),
        "dumped": list(dump),
        "apart": None if dumped is None else magnitude_line(dumped),
        "distance": None if dumped is None else magnitude_report(dumped),
        "same_place": dumped is None or first is None or (dumped.first is not None and dumped.first.name == first.name),
        "remarks": remarks,
    }


def _can_be_trained(ledger: Ledger) -> bool:
    where = run_directory(ledger)
    return where is not None and RunDir(where).run.is_file() and RunDir(where).config.is_file()


def _other_versions(comparison: Comparison) -> list[str]:
    """Runs recorded with other versions than those installed, which may compute other bits."""
    said = []
    now = json.loads(json.dumps(versions()))
    for ledger in (comparison.a, comparison.b):
        then = ledger.header.versions
        other = [
            f"{name} {then[name]} then and {now[name]} now" for name in now if name in then and then[name] != now[name]
        ]
        other = [text for text in other if not text.startswith("git_commit ")]
        if other:
            said.append(f"{_name(ledger)} was recorded with other versions: {', '.join(other)}")
    return said


def _name(ledger: Ledger) -> str:
    return str(ledger.path.parent)
