"""`tpi audit`: train the same twice, once with CUDA graphs replayed, and compare the gradients' norms."""

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.compare import norm_ratios
from tp_invariant_recipes.compare.norm_ratios import GroupRatio, Judged, Norms
from tp_invariant_recipes.config import reserved
from tp_invariant_recipes.config.bounds import LARGEST
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, given, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, TpiError, listed
from tp_invariant_recipes.launch import local, plan, record
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.plural import counted
from tp_invariant_recipes.runs import attempts
from tp_invariant_recipes.runs.audit_dir import AuditDir, AuditedRun, AuditTask
from tp_invariant_recipes.runs.lock import LockLost, locked, locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.settings import cuda_graphs, layout
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training import audit as rank

STEPS = 8  # the default number of steps of each training
NEVER = 1_000_000  # warm-up steps that a training never completes, so that it captures nothing
ROUNDED = "rounded"  # the third training

# An audit compares norms, so it records digests only on request.
DEFAULTS = ("ledger.digests=0",)
# An audit looks for defects of Megatron's and Transformer Engine's own layers.
NUMERICS = "numerics=stock"


@dataclass(frozen=True)
class Pair:
    """Two trainings that should have the same gradients: their names, and the overrides that distinguish them.

    replays: whether the second replays CUDA graphs, which the first never does.
    """

    first: str
    second: str
    of_first: tuple[str, ...]
    of_second: tuple[str, ...]
    replays: bool


@dataclass(frozen=True)
class Audit:
    """An audit, ready to start.

    plans:       the run of each training of the pair, and of the training that shows the effect of rounding.
    counts_from: the first judged step.
    """

    directory: AuditDir
    pair: Pair
    plans: dict[str, Plan]
    counts_from: int

    @property
    def first(self) -> Plan:
        """The run of the first training."""
        return self.plans[self.pair.first]


def new(
    model: str,
    overrides: Sequence[str],
    *,
    against: Sequence[str] = (),
    steps: int | None = None,
    directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Plan an audit. It writes nothing. Raises a TpiError that lists all problems.

    against: overrides of the second training; none: it replays the CUDA graphs that the first does not.
    steps:   of each training; None: the value of `iters`, or 8. progress: as for `plan.new`.
    """
    requested, differing = parse_all(overrides), parse_all(against)
    if against:
        pair = Pair("first", "second", (), texts(differing), replays=False)
    else:
        pair = Pair("eager", "replayed", (f"model.cuda_graph_warmup_steps={NEVER}",), (), replays=True)
    problems, sound = reserved.check("audit", requested)
    problems += reserved.check("audit", differing)[0]
    length_given = given(requested, "train.train_iters") is not None
    problems += _steps_problems(length_given, steps)
    problems += [f"--against {o.text}: both train for as long" for o in differing if o.path == "train.train_iters"]
    length = [] if length_given else [f"iters={steps if steps and 0 < steps <= LARGEST else STEPS}"]
    numerics = [] if given(sound, "numerics.mode") else [NUMERICS]
    common: list[str | Override] = [*DEFAULTS, *numerics, *sound, *length, "save=0"]
    composed = _composed(model, common, pair, problems)
    counts_from = _warmup(composed[pair.second].config) + 1 if pair.replays else 1
    where = AuditDir(choose_for_several(directory, f"audit-{model}-tp{layout.of(composed[pair.first].config).tp}"))
    names = {pair.first: pair.first, pair.second: pair.second, ROUNDED: pair.first}
    plans = {
        name: plan.resolve_beside(composed[of], where.training(name), where.index_cache, progress)
        for name, of in names.items()
    }
    return Audit(where, pair, plans, counts_from)


def check(audit: Audit) -> None:
    """Let Bridge validate both trainings. Imports Bridge, 10 to 20 s. Raises ConfigError."""
    from tp_invariant_recipes.launch import train

    for name in (audit.pair.first, audit.pair.second):
        train.check(audit.plans[name])


def execute(audit: Audit, watch: Watch, *, keep: bool = False) -> dict[str, Any]:
    """Train the pair, and if its norms differ in any bit, the training with rounding. Returns the contents of
    `audit.json`. Raises RunError.

    keep: keep the run directories even if no group differs.
    """
    with locked_empty(audit.directory):
        first, second = (_train(audit, name, watch) for name in (audit.pair.first, audit.pair.second))
        if audit.pair.replays:
            _check_replayed(first, second, audit.counts_from)
        equal = norm_ratios.same(first, second)
        rounded = None if equal else _train(audit, ROUNDED, watch, rounded_from=audit.counts_from)
        judged = norm_ratios.judge_ratios(first, second, rounded, counts_from=audit.counts_from)
        found = result(audit, judged)
        audit.directory.write(audit.directory.result, found)
        if not (judged.different or keep):
            for name in audit.plans:
                shutil.rmtree(audit.directory.training(name).path, ignore_errors=True)
        return found


def result(audit: Audit, judged: Judged) -> dict[str, Any]:
    """The result of an audit, as JSON."""
    first = audit.first
    return {
        "schema": 1,
        "exit_status": 1 if judged.different else 0,
        "verdict": "different" if judged.different else "same",
        "text": _text(audit, judged),
        "remarks": _remarks(audit, judged),
        "directory": str(audit.directory.path),
        "model": first.composed.model,
        "overrides": [text for text in texts(first.composed.overrides) if text not in (*DEFAULTS, NUMERICS)],
        "pair": asdict(audit.pair),
        "layout": first.layout.as_dict(),
        "ranks": first.layout.world,
        "device": first.device,
        "host": os.uname().nodename,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["tpi", *sys.argv[1:]]),
        "steps": first.steps,
        "counts_from": audit.counts_from,
        "margin": norm_ratios.MARGIN,
        "groups": [asdict(group) | {"worst": _finite(asdict(group.worst))} for group in judged.groups],
        "parameters": [_finite(asdict(ratio)) for ratio in judged.ratios],
        "set_aside": [_numbers(asdict(one)) for one in judged.aside],
    }


# --- Planning ---


def _steps_problems(length_given: bool, steps: int | None) -> list[str]:
    if steps is None:
        return []
    if length_given:
        return [f"--steps {steps} and iters say the same; leave one out"]
    if steps > LARGEST:
        return [f"--steps {steps}: must be at most {LARGEST}"]
    return [f"--steps {steps}: must be at least 1"] if steps < 1 else []


def _replay_problems(config: RunConfig) -> list[str]:
    """The reasons why the second training would replay nothing."""
    if not cuda_graphs.requested(config.model):
        return [
            "nothing is replayed with cuda_graph=off; cuda_graph=te or cuda_graph=full, or another pair of trainings: "
            "--against KEY=VALUE"
        ]
    warmup, iters = _warmup(config), config.train["train_iters"]
    if warmup < iters:
        return []
    return [f"graphs are captured after {counted(warmup, 'step')}, and there are {iters}; --steps {warmup + 5}"]


def _warmup(config: RunConfig) -> int:
    return config.model.get("cuda_graph_warmup_steps", 3)  # Core's default


def _composed(model: str, overrides: Sequence[str | Override], pair: Pair, problems: list[str]) -> dict[str, Composed]:
    """Compose both trainings. Raises ConfigError that lists `problems` and the problems of both, each once."""
    device = plan.detect_device()
    composed = {}
    for name, own in ((pair.second, pair.of_second), (pair.first, pair.of_first)):
        try:
            composed[name] = compose(model, [*overrides, *own], device=device)
            if pair.replays and name == pair.second:
                problems += _replay_problems(composed[name].config)
        except ConfigError as error:
            problems += (problem for problem in error.problems if problem not in problems)
        if pair.replays and problems:
            break  # the other differs only in a number of steps, and checking that field imports Bridge
    if problems:
        raise ConfigError(listed(problems), problems)
    return composed


# --- Training ---


def _train(audit: Audit, name: str, watch: Watch, *, rounded_from: int | None = None) -> list[Norms]:
    """The norms of every step."""
    planned, run = audit.plans[name], audit.directory.training(name)
    stopped = f"the audit was stopped before its end, in the training {name}: {run.path}"
    with locked(run):
        record.write(planned)
        run.write_task(AuditTask(rounded_from))
        try:
            with watch(name, planned) as tick:
                outcome = local.run(planned, tick, rank_fn=rank.measure)
        except LockLost:
            raise
        except TpiError as error:
            with suppress(TpiError):  # usually a full disk, which the run's own error reports
                attempts.end(run, "failed", str(error))
            raise RunError(f"the training {name} failed, so that nothing can be compared\n{error}") from error
        except KeyboardInterrupt:
            attempts.end(run, local.Outcome.STOPPED.value)
            raise Interrupted(stopped) from None
        attempts.end(run, outcome.value)
        if outcome is local.Outcome.STOPPED:
            raise RunError(stopped)
        return _complete(run, planned.steps)


def _complete(run: AuditedRun, steps: int) -> list[Norms]:
    norms = run.read_norms()
    if [one.step for one in norms] != list(range(1, steps + 1)):
        raise RunError(
            f"{run.norms} has not one line for each of {steps} steps: a step that is skipped has no gradients"
        )
    return norms


def _check_replayed(first: Sequence[Norms], second: Sequence[Norms], counts_from: int) -> None:
    """Raises RunError unless the second training replayed graphs at every judged step, and the first at none."""
    if any(one.graphs for one in first):
        raise RunError("the eager training replayed CUDA graphs too: there is nothing to compare with")
    missing = [one.step for one in second if one.step >= counts_from and not one.graphs]
    if missing:
        raise RunError(
            f"no CUDA graph was replayed at step {missing[0]}: Transformer Engine captured no layer; "
            f"capture more: model.cuda_graph_modules"
        )


# --- Results ---


def _text(audit: Audit, judged: Judged) -> str:
    pair = audit.pair
    if not judged.different:
        rounding = [group.name for group in judged.groups if group.state == "rounding"]
        how = "bit for bit" if not rounding else f"but for rounding ({', '.join(rounding)})"
        counted = f"over steps {audit.counts_from} to {audit.first.steps}"
        if judged.aside:
            parameters = {one.name for one in judged.ratios} | {one.name for one in judged.aside}
            counted += f"; set aside: {len(judged.aside)} of {len(parameters)} parameters"
        return f"same: gradient norms of {pair.first} and {pair.second} are equal {how} {counted}"
    in_time = sorted(judged.different, key=lambda group: group.since or 0)
    named = ", ".join(f"{group.name} {_times(group)} from step {group.since}" for group in in_time)
    return f"different: gradients of {pair.second} are not those of {pair.first}: {named}"


def _times(group: GroupRatio) -> str:
    """The second norm of a whole group as a multiple of the first."""
    return f"×{group.second / group.first:.3g}" if group.first else f"{group.second:.3g} instead of 0"


def _remarks(audit: Audit, judged: Judged) -> list[str]:
    remarks = [
        f"not judged from step {one.since} on: {one.name}: rounding alone takes the norm of its gradient from "
        f"{one.first:.3g} to {one.other:.3g}, as when an expert gets no token"
        for one in judged.aside
    ]
    if len({group.since for group in judged.different}) > 1:
        remarks.append("groups that differ later may do so for what the first did to the weights")
    if not judged.repeats:
        remarks.append(
            f"the steps before {audit.counts_from} are the same computation in both and have other norms: these "
            f"trainings do not repeat themselves (model.deterministic_mode=true), and by how much counts as rounding"
        )
    return remarks


def _finite(ratio: dict[str, Any]) -> dict[str, Any]:
    """A ratio without infinities, which JSON lacks."""
    return ratio | {"deviation": None if ratio["ratio"] is None else ratio["deviation"]}


def _numbers(aside: dict[str, Any]) -> dict[str, Any]:
    return aside | {name: aside[name] if math.isfinite(aside[name]) else None for name in ("first", "other")}
