# SPDX-License-Identifier: Apache-2.0
"""`tpi audit`: train a configuration and a simple reference, and judge every tensor by what rounding does there."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.invariant import training as training_rules
from tp_invariant_recipes.comparison import deviation
from tp_invariant_recipes.comparison.deviation import StepDumps, TensorDeviation
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, changed, check_reserved, given, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, Interrupted, LedgerError, RunError, TpiError, listed
from tp_invariant_recipes.features.audit import rank
from tp_invariant_recipes.features.audit import reference as audit_reference
from tp_invariant_recipes.features.audit.result import (
    BEYOND,
    DITHERED,
    NOT_DECIDED,
    WITHIN,
    AuditResult,
    blind_line,
    verdict_line,
)
from tp_invariant_recipes.files import free_bytes
from tp_invariant_recipes.launch import local, plan, record
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.launch.ranks import RankFn
from tp_invariant_recipes.ledger import dumps
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.runs import restarts
from tp_invariant_recipes.runs.lock import LockLost, locked, locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.runs.sweep_dir import AuditDir, AuditedRun, AuditTask
from tp_invariant_recipes.settings import cuda_graphs, finetuning
from tp_invariant_recipes.settings.run_config import COMBINED, RunConfig
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.sizing.activations import recorded as recorded_bytes
from tp_invariant_recipes.sizing.memory import GIB
from tp_invariant_recipes.text import plural

TRAININGS = AUDITED, REFERENCE = "audited", "reference"
DEGREES = (1, 2, 4, 8)  # of references, the first that fits
BLIND = 0.5  # Muon's matrices by blocks are that wrong; Adam's first updates are signs, which rounding turns

# An audit compares values, so it records digests only on request.
DEFAULTS = ("ledger.digests=0",)
# An audit looks for defects of Megatron's and Transformer Engine's own layers, from the same weights in every layout.
STOCK = f"numerics={mode.STOCK}"
NUMERICS = {"numerics.mode": STOCK, "numerics.initial_weights": "numerics.initial_weights=invariant"}


class StoppedAudit(RunError):
    """A signal ended a training."""


@dataclass(frozen=True)
class Audit:
    """An audit, ready to start.

    of_reference: what the reference has other than the audited configuration, as overrides.
    first:        the first judged step; the last is the trainings' last.
    """

    directory: AuditDir
    of_reference: tuple[str, ...]
    audited: Plan
    reference: Plan
    first: int

    @property
    def steps(self) -> range:
        """The judged steps."""
        return range(self.first, self.audited.steps + 1)

    @property
    def recordings(self) -> tuple[int, ...]:
        """Bytes that are recorded of the audited run, and of the reference; they are kept on disk."""
        count, weights = len(self.steps), self.first == 1
        return tuple(recorded_bytes(run.config, count, weights=weights) for run in (self.audited, self.reference))

    @property
    def disk(self) -> int:
        """Bytes of all recordings."""
        repeated = recorded_bytes(self.reference.config, len(self.steps), weights=False)
        return sum(self.recordings) + DITHERED * repeated

    @property
    def host(self) -> int:
        """Bytes of host memory of all ranks, beside what a training needs: a step's tensors, and the file of them."""
        return 2 * max(self.recordings) // len(self.steps)


def new(
    model: str,
    overrides: Sequence[str | Override],
    *,
    reference: Sequence[str] = (),
    against: Sequence[str] = (),
    directory: Path | None = None,
    how: Planning = TO_TRAIN,
) -> Audit:
    """Plan an audit. It writes nothing. Raises a TpiError that lists all problems.

    reference: more overrides of the reference, after those in audit_reference.py.
    against:   overrides of the audited run alone; the reference is the model as given.
    """
    requested, of_reference, differing = parse_all(overrides), parse_all(reference), parse_all(against)
    problems, sound = check_reserved("audit", requested)
    problems += _pair_problems(of_reference, differing)
    common: list[str | Override] = [*DEFAULTS, *default_numerics(sound), *sound, "save=0"]
    audited = _composed(model, changed(common, differing), problems)
    if problems or audited is None:
        raise ConfigError(listed(problems), problems)
    typed = given(requested, "train.train_iters") is not None
    wanted = audited.config.train["train_iters"] if typed else _steps(audited.config)
    length = f"iters={wanted}"
    audited = _composed(model, [*changed(common, differing), length], problems)
    first = _first(audited.config, wanted, problems) if audited else 1
    if audited and not (against or of_reference):
        problems += _own_reference(model, audited.config)
    if problems or audited is None:
        raise ConfigError(listed(problems), problems)
    own: tuple[str, ...]
    if against:
        made, own = _composed(model, [*common, length], problems), tuple(texts(differing))
    else:
        made, own = _reference(model, [*common, length], audited.config, of_reference, problems)
    for solve in {run.config.without_overlap for run in (audited, made) if run and run.config.overlaps()}:
        problems.append(f"{COMBINED}=true: an audit reads whole layers; {solve}")
    if problems or made is None:
        raise ConfigError(listed(problems), problems)
    where = AuditDir(choose_for_several(directory, f"audit-{model}-tp{audited.config.layout.tp}"))
    runs, references = (
        plan.resolve_beside(run, where.training(name), where.index_cache, how)
        for name, run in ((AUDITED, audited), (REFERENCE, made))
    )
    audit = Audit(where, own, runs, references, first)
    if (free := free_bytes(where.path)) < audit.disk:
        raise RunError(  # of the machine, so that a campaign ends with it
            f"this audit records about {audit.disk / GIB:.1f} GiB, and the disk of {where.path} has "
            f"{free / GIB:.1f} GiB free; --dir PATH on another disk, or a smaller seq, gbs or model.num_layers"
        )
    return audit


def _pair_problems(of_reference: Sequence[Override], differing: Sequence[Override]) -> list[str]:
    """Problems of the overrides of one training alone: those of --reference, and those of --against."""
    problems = check_reserved("audit", of_reference)[0] + check_reserved("audit", differing)[0]
    if of_reference and differing:
        problems.append("--reference and --against: with --against the reference is the model as given; leave one out")
    for flag, both in (("--against", differing), ("--reference", of_reference)):
        problems += [f"{flag} {o.text}: both train for as long" for o in both if o.path == "train.train_iters"]
    return problems


def _own_reference(model: str, config: RunConfig) -> list[str]:
    """Return the problem of a configuration that has nothing its reference has not."""
    if audit_reference.overrides(config, []):
        return []
    return [
        f"{model} is its own reference: it has one rank, no CUDA graphs, overlap or fusions; audit another "
        "layout (tp=2), cuda_graph=te, or a pair of trainings: --against KEY=VALUE"
    ]


def default_numerics(overrides: Sequence[Override]) -> list[str]:
    """Return the overrides of an audit's numerics, where none are typed."""
    numerics, weights = given(overrides, "numerics.mode"), given(overrides, "weights.folder")
    stock = numerics is None or numerics.value == mode.STOCK
    return [
        text
        for path, text in NUMERICS.items()
        if given(overrides, path) is None and (text == STOCK or (stock and weights is None))
    ]


def check(audit: Audit) -> None:
    """Let Bridge validate both trainings. Imports Bridge, which takes seconds. Raises ConfigError."""
    from tp_invariant_recipes.launch import train

    for planned in (audit.audited, audit.reference):
        train.check(planned)


def execute(
    audit: Audit,
    watch: Watch,
    *,
    keep: bool = False,
) -> AuditResult:
    """Train both, and judge. Raises RunError.

    keep: keep the run directories even if nothing is outside rounding-error tolerance.
    """
    begun = time.monotonic()
    with locked_empty(audit.directory):
        runs = [_train(audit, AUDITED, audit.audited, watch), _train(audit, REFERENCE, audit.reference, watch)]
        deviations, omitted = judged(runs[0], runs[1], audit.steps)
        described = {
            "model": audit.audited.composed.model,
            "overrides": shown(audit.audited.composed),
            "reference": list(audit.of_reference),
            "layout": audit.audited.layout.as_dict(),
            "reference_layout": audit.reference.layout.as_dict(),
            "device": audit.audited.device,
            "bytes": sum(file.stat().st_size for run in runs for file in run.path.rglob("*.safetensors")),
            "seconds": round(time.monotonic() - begun, 1),
        }
        result = report(audit.directory, deviations, omitted, described, audit.audited.config)
        if not (result.exit_status or keep):
            for run in runs:
                shutil.rmtree(run.path, ignore_errors=True)
        return result


def recorded(run: Path, reference: Path, directory: Path | None = None) -> AuditResult:
    """Judge two recordings of `tp_invariant_recipes.recordings.record`.

    LedgerError: one is no recording, or the reference has no dithered repetitions.
    """
    runs = [AuditedRun(path.expanduser()) for path in (run, reference)]
    steps = sorted(set(dumps.steps(runs[0].path)) & set(dumps.steps(runs[1].path)))
    if not steps:
        raise LedgerError(f"{run} and {reference} have no step in common that both recorded")
    where = AuditDir(choose_for_several(directory, "audit-recorded"))
    with locked_empty(where):
        deviations, omitted = judged(runs[0], runs[1], steps)
        return report(where, deviations, omitted, {"recorded": [str(audited_run.path) for audited_run in runs]})


def judged(run: AuditedRun, reference: AuditedRun, steps: Sequence[int]) -> tuple[list[TensorDeviation], list[str]]:
    """Return the deviations of all steps in order, and the names that are not compared. LedgerError, RunError."""
    dithered = [dithered_path for n in range(1, DITHERED + 1) if (dithered_path := reference.dithered(n).path).is_dir()]
    if not dithered:
        raise LedgerError(
            f"{reference.path} has no dithered repetition, which shows what rounding does: record(dither=1)"
        )
    deviations: list[TensorDeviation] = []
    omitted: dict[str, None] = {}
    for step in steps:
        read = [dumps.read_step(path, step) for path in (run.path, reference.path, *dithered)]
        of_step, missing = deviation.judge(StepDumps(step, read[0], read[1], tuple(read[2:])))
        deviations += of_step
        omitted |= dict.fromkeys(missing)
    return deviations, list(omitted)


def report(
    where: AuditDir,
    deviations: Sequence[TensorDeviation],
    omitted: Sequence[str],
    facts: Mapping[str, Any],
    config: RunConfig | None = None,
) -> AuditResult:
    """Judge, and write `audit.json`.

    facts: of the trainings or recordings. config: of the audited run; None: of a program with a loop of its own.
    """
    first = next((tensor for tensor in deviations if tensor.beyond), None)
    spots = deviation.blind_spots(deviations)
    muon = config is not None and config.section("optimizer").get("optimizer") == "muon"
    limit = BLIND if muon else 1.0
    blind = next((tensor for tensor in spots.values() if tensor.factor and (tensor.sees or 0.0) > limit), None)
    if first or blind is None:
        verdict, words = BEYOND if first else WITHIN, verdict_line(deviations, first, omitted)
    else:
        more = f": seq={4 * config.shape.sequence}" if config else ""
        verdict, words = NOT_DECIDED, f"{blind_line(blind)}; more tokens round less{more}"
    fault = faults.of_tensor(config, first.name) if config and first else None
    known = str(fault) if fault else None
    parts = tuple(deviations), tuple(omitted), spots
    result = AuditResult(where.path, verdict, words, known, {**facts, **made()}, *parts)
    where.write(where.result, result.as_json())
    return result


def made() -> dict[str, str]:
    """Return when and where a result is made."""
    return {
        "host": os.uname().nodename,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["tpi", *sys.argv[1:]]),
    }


# --- Planning ---


def _warmup(config: RunConfig) -> int:
    return config.model.get("cuda_graph_warmup_steps", 3)  # Core's default


def _steps(config: RunConfig) -> int:
    """As many as show all: two where weights are gathered late, or from shards; with graphs two that replay."""
    if cuda_graphs.requested(config.model):
        return _warmup(config) + 2
    return 2 if config.section("ddp").get("overlap_param_gather") or config.fsdp else 1


def _first(config: RunConfig, steps: int, problems: list[str]) -> int:
    """Return the first judged step. A step that captures graphs cannot be recorded, so it is the one after."""
    if not cuda_graphs.requested(config.model):
        return 1
    warmup = _warmup(config)
    if steps < warmup + 2:
        problems.append(
            f"graphs are captured after {plural(warmup, 'step')} and replayed from step {warmup + 2} on, and there "
            f"are {steps}; iters={warmup + 2}"
        )
    return warmup + 2


def _composed(model: str, overrides: Sequence[str | Override], problems: list[str]) -> Composed | None:
    """Compose; add new problems. None: there were some."""
    try:
        composed = compose(model, overrides, device=plan.detect_device())
    except ConfigError as error:
        problems += (problem for problem in error.problems if problem not in problems)
        return None
    problems += _other_starts(composed.config)
    rates = [f"model.{name}=0" for name in ("hidden_dropout", "attention_dropout") if composed.config.model.get(name)]
    problems += [f"dropout draws other numbers in every layout: {rate}" for rate in rates if rate not in str(problems)]
    return composed


def _other_starts(config: RunConfig) -> list[str]:
    """Problems of weights that begin otherwise in every layout."""
    problems, etp = [], config.layout.etp
    if etp > 1 and config.numerics.initial_weights == "invariant" and config.weights.folder is None:
        problems.append(f"etp={etp}: every layout would begin with other experts; etp=1, or weights=FOLDER")
    fields = finetuning.section(config)
    if fields is not None and training_rules.of_experts(config, fields) and not config.numerics.invariant:
        targets = [name for name in finetuning.targets(fields) if name not in finetuning.FEED_FORWARD]
        problems.append(
            "adapters of experts begin with other weights in every layout, which is no rounding; "
            f"peft.target_modules=[{','.join(targets) or 'linear_qkv'}], or numerics=tree"
        )
    return problems


def _reference(
    model: str, common: list[str | Override], audited: RunConfig, own: list[Override], problems: list[str]
) -> tuple[Composed | None, tuple[str, ...]]:
    """Return the first reference whose memory suffices, and its overrides."""
    first: list[str] = []
    for degree in DEGREES:
        more = (*audit_reference.overrides(audited, own, degree), *texts(own))
        refusals: list[str] = []
        composed = _composed(model, changed(common, more), refusals)
        if composed is None or refusals:  # which more ranks would only hide
            first = refusals
            break
        if not (large := available_memory.problems(composed.config, here=True)):
            return composed, more
        first = first or large
    problems += [f"the reference: {problem}" for problem in first]
    return None, ()


# --- Training ---


def _train(audit: Audit, name: str, planned: Plan, watch: Watch) -> AuditedRun:
    follow = None if name == AUDITED else f"../{AUDITED}"
    task = AuditTask(1 if name == AUDITED else 1 + DITHERED, audit.first, planned.steps, follow)
    return trained(audit.directory.training(name), planned, task, watch, rank.measure)


def trained(run: AuditedRun, planned: Plan, task: AuditTask, watch: Watch, rank_fn: RankFn) -> AuditedRun:
    """Train one of the trainings that are compared, in its directory. RunError: it failed, or a signal ended it."""
    name = run.path.name
    stopped = f"the audit was stopped before its end, in the training {name}: {run.path}"
    with locked(run):
        record.write(planned)
        run.write(run.task, task)
        try:
            with watch(name, planned) as tick:
                outcome = local.run(planned, tick, rank_fn=rank_fn, process_groups=task.passes)
        except LockLost:
            raise
        except TpiError as error:
            with suppress(TpiError):  # usually a full disk, which the run's own error reports
                restarts.end(run, "failed", str(error))
            raise RunError(f"the training {name} failed, so that nothing can be compared\n{error}") from error
        except KeyboardInterrupt:
            restarts.end(run, local.Outcome.STOPPED.value)
            raise Interrupted(stopped) from None
        restarts.end(run, outcome.value)
        if outcome is local.Outcome.STOPPED:
            raise StoppedAudit(stopped)
    return run


def shown(composed: Composed) -> list[str]:
    """Return the overrides of an audited training that an audit has not added."""
    return [text for text in texts(composed.overrides) if text not in (*DEFAULTS, *NUMERICS.values())]
