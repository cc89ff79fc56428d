# SPDX-License-Identifier: Apache-2.0
"""`tpi verify`: plan the configurations of a sweep, train them in turn, judge the ledgers."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import Override, check_reserved, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, LedgerError, RunError, TpiError, refuse
from tp_invariant_recipes.features.verify.configurations import (
    Choice,
    Problems,
    compose_configurations,
    compose_each,
    configuration_of,
    fitting_choices,
    identities,
    named,
    plan_configurations,
    spread,
    with_enough_shards,
    with_equal_shards,
)
from tp_invariant_recipes.features.verify.verdict import PASSED, STOPPED, SweepVerdict, judge, verdict_on
from tp_invariant_recipes.launch import plan, trust
from tp_invariant_recipes.launch.local import Outcome as Ended
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.launch.ranks import interruptible
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.ledger.schema import Header, canonical, fingerprint_differences
from tp_invariant_recipes.runs.checkpoints import ASIDE, move_aside
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.runs.sweep_dir import Configuration, Sweep, SweepDir

PLANNED = ("identity_hash", "layout", "numerics", "steps")  # fields of a configuration that a rerun must have, too
__all__ = ["SweepVerdict", "Verification", "check", "execute", "judge", "new", "plan_rerun"]


@dataclass(frozen=True)
class Verification:
    """A sweep, ready to start.

    plans: name of a configuration -> its run, in order. Cells that an earlier verify has done have none.
    anew:  configurations of an earlier verify that begin again: what it left of them is moved to `set-aside/`.
    rerun: whether there was an earlier verify.
    """

    directory: SweepDir
    matrix: Sweep
    plans: dict[str, Plan]
    anew: frozenset[str] = frozenset()
    rerun: bool = False

    @property
    def cells(self) -> tuple[Configuration, ...]:
        """Return the configurations to train."""
        return tuple(cell for cell in self.matrix.cells if cell.name in self.plans)


def new(
    model: str,
    overrides: Sequence[str | Override],
    *,
    against: Path | None,
    directory: Path | None,
    how: Planning = TO_TRAIN,
) -> Verification:
    """Plan all configurations. It writes only the data cache. Raises a TpiError that lists the problems of all
    configurations.

    against: a run directory, ledger or certificate to compare all configurations with, instead of the first
    configuration.
    """
    requested = parse_all(overrides)
    problems, sound = check_reserved("verify", requested)
    axes, choices = spread(sound, problems)
    reference = _reference(against, problems)
    if len(choices) == 1 and not problems and against is None:
        problems.append(
            "a sweep of one configuration compares nothing: give a key several values, as in tp=1,2,4, or a "
            "ledger: --against FILE"
        )
    choices = with_enough_shards(choices, reference)
    composed, omitted = compose_configurations(model, axes, choices, problems, how.here)
    before = [choice for choice in choices if choice.label in composed]
    kept = with_equal_shards(before, composed, reference)
    changed, cell_problems = compose_each(model, [choice for choice in kept if choice not in before], how.here)
    cell_problems.raise_any()
    composed |= changed
    kept, too_large = fitting_choices(kept, composed, how.here)
    choices = tuple(named(choice, composed[choice.label]) for choice in kept)
    composed = {choice.label: composed[choice.label] for choice in kept}
    omitted += too_large
    where = SweepDir(choose_for_several(directory, f"verify-{model}"))
    plans = plan_configurations(choices, list(composed.values()), where, how)
    problems = identities(axes, choices, plans)
    if reference is not None and not problems:
        differences = fingerprint_differences(reference.header, Header(identity=next(iter(plans.values())).identity))
        problems = [
            f"--against {reference.path} is of another experiment: {d.field} is {d.a or 'not set'} there and "
            f"{d.b or 'not set'} here"
            for d in differences
        ]
    refuse(problems)
    cells = tuple(configuration_of(choice, plans[choice.name]) for choice in choices)
    path = None if against is None else str(against.expanduser().absolute())
    return Verification(where, Sweep(model, texts(requested), axes, cells, path, omitted), plans)


def plan_rerun(
    directory: Path, *, against: Path | None = None, how: Planning = TO_TRAIN
) -> Verification | SweepVerdict:
    """Plan the configurations of an earlier verify that did not pass; the verdict if all have. against: as for `judge`.

    A stopped configuration goes on from its checkpoint, others begin anew. TpiError: one would be another run than
    planned.
    """
    where = SweepDir(directory)
    requested = where.read_matrix()
    trust.require(directory, requested)
    if against is not None:
        requested = replace(requested, against=str(against.expanduser().absolute()))
    verdict = judge(directory, requested.against)
    states = {row.run: row.state for row in verdict.rows}
    cells = [cell for cell in requested.cells if states[where.cell(cell.name).path] not in PASSED]
    if not cells:
        return verdict
    device, cell_problems, plans = _device(where, requested), Problems(), {}
    anew = frozenset(cell.name for cell in cells if states[where.cell(cell.name).path] != STOPPED)
    for cell in cells:
        with cell_problems.recording(cell.label):
            plans[cell.name] = _replanned(requested, cell, where, how, device if cell.name in anew else None)
    cell_problems.raise_any()
    return Verification(where, requested, plans, anew, rerun=True)


def _device(where: SweepDir, requested: Sweep) -> str:
    """Return the device of the configurations that have run; where none has, what is here."""
    for cell in requested.cells:
        with suppress(RunError):
            return where.cell(cell.name).read_run(RunFile).device
    return plan.detect_device()


def _replanned(requested: Sweep, cell: Configuration, where: SweepDir, how: Planning, device: str | None) -> Plan:
    """Return the plan of a configuration that begins anew; device None: goes on. ConfigError: it would be another
    run."""
    run = where.cell(cell.name)
    if device is None:
        request = RunRequest(None, (), run.path)
        planned = request.plan(request.composed(), how)
    else:
        composed = compose(requested.model, cell.overrides, device=device)
        planned = replace(plan.resolve(composed, run, how), attempts=None)
    now = configuration_of(Choice(cell.name, cell.label, (), tuple(parse_all(cell.overrides))), planned)
    # As JSON, since one of the two was read from a file.
    fields = {name: [canonical(getattr(of, name)) for of in (now, cell)] for name in PLANNED}
    if changed := [name for name, (one, other) in fields.items() if one != other]:
        raise ConfigError(f"it would be another run now than the one planned ({', '.join(changed)}); verify anew")
    return planned


def check(verification: Verification) -> None:
    """Let Bridge validate every configuration. Imports Bridge, which takes seconds.

    Raises ConfigError with the problems of all.
    """
    from tp_invariant_recipes.launch import train

    cell_problems = Problems()
    for cell in verification.cells:
        with cell_problems.recording(cell.label):
            train.check(verification.plans[cell.name])
    cell_problems.raise_any()


def execute(verification: Verification, watch: Watch, *, exitfirst: bool = False) -> SweepVerdict:
    """Write the directory, train the configurations one after the other, and judge them. Raises RunError.

    exitfirst: end with the first configuration that fails or differs. watch: takes a configuration's label and plan,
    shows its progress.
    """
    where = verification.directory
    with (locked if verification.rerun else locked_empty)(where):
        interrupted = train_configurations(verification, watch, exitfirst=exitfirst)
        verdict = judge(where.path, verification.matrix.against, exitfirst=exitfirst)
        return replace(verdict, interrupted=interrupted)


def train_configurations(verification: Verification, watch: Watch, *, exitfirst: bool = False) -> bool:
    """Write the sweep and train its configurations in turn; whether Ctrl-C ended it. The caller holds the directory's
    lock."""
    where = verification.directory
    with interruptible() as stop:
        if not verification.rerun:
            where.write_matrix(trust.sealed(verification.matrix))
        try:
            for cell in verification.cells:
                if cell.name in verification.anew:
                    _set_aside(where, cell)
                if _train(cell, verification.plans[cell.name], watch) is Ended.STOPPED:
                    break
                if exitfirst and not _passes(verification, cell):
                    break
        except KeyboardInterrupt:  # the files of an unfinished configuration count as they are
            return not stop.requests
    return False


def _passes(verification: Verification, cell: Configuration) -> bool:
    where = verification.directory
    rows = verdict_on(where.path, verification.matrix.against).rows
    return next(row.state for row in rows if row.run == where.cell(cell.name).path) in PASSED


def _set_aside(where: SweepDir, cell: Configuration) -> None:
    """Move what an earlier verify left of a configuration to `set-aside/`. Raises RunError: somebody trains there."""
    run = where.cell(cell.name)
    if not run.path.exists():
        return
    aside = where.path / ASIDE
    with locked(run):
        try:
            move_aside(run.path, aside)
        except OSError as error:
            raise RunError(f"cannot move {run.path} to {aside}: {error.strerror or error}") from error


def _train(cell: Configuration, planned: Plan, watch: Watch) -> Ended | None:
    """Return the end of a configuration's run; None: it failed, and its run directory has the reason."""
    from tp_invariant_recipes.features.train import rank
    from tp_invariant_recipes.launch import train

    try:
        with watch(cell.label, planned) as tick:
            return train.execute(planned, tick, rank_fn=rank.train)
    except TpiError:
        return None


def _reference(against: Path | None, problems: list[str]) -> Ledger | None:
    if against is None:
        return None
    try:
        ledger = read(against.expanduser())
    except LedgerError as error:
        problems.append(f"--against: {error}")
        return None
    if not ledger.steps:
        problems.append(f"--against {against}: there is no step in this ledger")
    return ledger
