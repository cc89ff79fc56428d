# SPDX-License-Identifier: Apache-2.0
"""`tpi audit --resume-at K`: save at a step, load in a second process, and compare every state and step bit for bit."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, check_reserved, given, parse, parse_all
from tp_invariant_recipes.errors import CheckpointError, ConfigError, RunError, refuse
from tp_invariant_recipes.features.audit import rank, workflow
from tp_invariant_recipes.features.audit.result import DIFFERS, NOT_JUDGED, WHOLE
from tp_invariant_recipes.features.audit.resume_result import (
    GRAPHS,
    ChangedStep,
    LostState,
    ResumeResult,
    changed_steps,
    lost_states,
    verdict_line,
)
from tp_invariant_recipes.launch import plan, ranks, train
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.ledger.record import LedgerWriter
from tp_invariant_recipes.ledger.schema import StepRecord
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.runs import checkpoints
from tp_invariant_recipes.runs.lock import locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.runs.sweep_dir import AuditDir, AuditedRun, AuditTask
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

TRAININGS = UNINTERRUPTED, RESUMED, REPEATED = "uninterrupted", "resumed", "repeated"
Trainings = tuple[AuditedRun, AuditedRun]
ADDED = ("numerics=deterministic", "ledger.digests=1")  # where they are not typed
READ = "torch_dist"
MORE = 2  # steps after the resume, where iters is not typed


@dataclass(frozen=True)
class ResumeAudit:
    """An audit of a resume, ready to start.

    at: completed steps of the checkpoint. first: the training that saves. resumed: the other, which loads.
    repeated: the first once more.
    """

    directory: AuditDir
    at: int
    first: Plan
    resumed: Plan
    repeated: Plan

    @property
    def steps(self) -> range:
        """The steps after the resume."""
        return range(self.at + 1, self.first.steps + 1)


def new(
    model: str, overrides: Sequence[str], at: int, *, directory: Path | None = None, how: Planning = TO_TRAIN
) -> ResumeAudit:
    """Plan an audit of a resume at step `at`. It writes nothing. Raises a TpiError that lists all problems."""
    problems, sound = requested(parse_all(overrides), at)
    refuse(problems)
    common = [text for text in ADDED if given(sound, parse(text).field) is None]
    words: list[str | Override] = [*common, *sound, f"save={at}"]
    composed = compose(model, words, device=plan.detect_device())
    if given(sound, "train.train_iters") is None:
        composed = compose(model, [*words, f"iters={at + _more(composed)}"], device=plan.detect_device())
    if (form := saved_as(composed.config)) != READ:
        raise ConfigError(f"checkpoint.ckpt_format={form}: tpi cannot read it; checkpoint.ckpt_format={READ}")
    where = AuditDir(choose_for_several(directory, f"audit-{model}-resume{at}"))
    first, resumed, repeated = (
        plan.resolve_beside(composed, where.training(name), where.index_cache, how) for name in TRAININGS
    )
    if first.steps <= at:
        every = composed.config.train["exit_interval"]
        raise ConfigError(f"train.exit_interval={every} ends the training at step {first.steps}; leave it out")
    load = {"load": str(first.run_dir.checkpoints), "ckpt_step": at, "save": None, "async_save": False}
    resumed = replace(resumed, config=resumed.config.with_fields("checkpoint", **load), start=at)
    return ResumeAudit(where, at, first, resumed, repeated)


def saved_as(config: RunConfig) -> Any:
    """Return the format of a training's checkpoints; an audit of a resume needs READ."""
    return config.section("checkpoint").get("ckpt_format")


def requested(overrides: Sequence[Override], at: int) -> tuple[list[str], list[Override]]:
    """Return what is wrong with a resume at step `at` of a training with these overrides, and the other overrides."""
    problems, sound = check_reserved("audit --resume-at", overrides)
    iters = given(sound, "train.train_iters")
    if at < 1:
        problems.append(f"--resume-at {at}: the first step that a training can save is 1; --resume-at 1")
    elif iters and iters.value.isdecimal() and int(iters.value) <= at:
        problems.append(f"--resume-at {at}: no step of iters={iters.value} follows; iters={at + MORE}")
    return problems, sound


def _more(composed: Composed) -> int:
    """Return how many steps show all: with graphs two that replay after the second capture."""
    model = composed.config.model
    return MORE + (model.get("cuda_graph_warmup_steps", 3) if cuda_graphs.requested(model) else 0)


def check(audit: ResumeAudit) -> None:
    """Let Bridge validate the training. Imports Bridge, which takes seconds. Raises ConfigError."""
    train.check(audit.first)


def execute(audit: ResumeAudit, watch: Watch, *, keep: bool = False, card: bool = False) -> ResumeResult:
    """Train both, and judge; train the first once more where only its own repetition tells. Raises RunError.

    keep: keep the run directories even of a whole resume. card: write `card.yaml`.
    """
    begun = time.monotonic()
    with locked_empty(audit.directory):
        first = _train(audit, UNINTERRUPTED, audit.first, watch)
        _check_saved(audit, first)
        _begin_ledger(audit, first)
        trainings = first, _train(audit, RESUMED, audit.resumed, watch)
        lost, changed = _compared(audit, trainings)
        captured = next((state for state in lost if state.kind == GRAPHS), None)
        lost = [state for state in lost if state.kind != GRAPHS]
        apart = None
        if changed and not (lost and audit.first.config.numerics.mode != mode.STOCK):
            repeated = _train(audit, REPEATED, audit.repeated, watch)
            states, steps = _compared(audit, (first, repeated), range(1, audit.first.steps + 1))
            apart = next((str(one) for one in (*steps, *states)), None)
        facts: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1)}
        facts |= {"graphs": (captured.was, captured.now)} if captured else {}
        facts |= {"card": str(audit.directory.card)} if card else {}
        result = _result(audit, trainings[0], lost, changed, apart, facts)
        _write(audit, result)
        if not (result.exit_status or keep):
            for name in TRAININGS:
                shutil.rmtree(audit.directory.training(name).path, ignore_errors=True)
        return result


def _train(audit: ResumeAudit, name: str, planned: Plan, watch: Watch) -> AuditedRun:
    task = AuditTask(1, audit.at + 1, planned.steps, None)
    run = workflow.trained(audit.directory.training(name), planned, task, watch, rank.train_and_record)
    train.check_completed(planned, ranks.Outcome.COMPLETED)
    return run


def _check_saved(audit: ResumeAudit, run: AuditedRun) -> None:
    """RunError: there is no whole checkpoint of the step."""
    try:
        checkpoints.select(run.checkpoints, audit.at)
    except CheckpointError as error:
        raise RunError(f"the training {UNINTERRUPTED} saved no checkpoint that can be loaded: {error}") from error


def _begin_ledger(audit: ResumeAudit, first: AuditedRun) -> None:
    """Give the resumed training the lines before it, without digests of its state, which would end it if it differs."""
    ledger, resumed = read(first.ledger), audit.directory.training(RESUMED)
    resumed.path.mkdir(parents=True, exist_ok=True)
    writer = LedgerWriter(resumed.ledger).create(ledger.header)
    for line in ledger.steps[: audit.at]:
        writer.append(replace(line, masters=None, weights=None, moments=None))


def _lines(run: AuditedRun) -> dict[int, StepRecord]:
    return {line.step: line for line in read(run.ledger).steps}


def _compared(
    audit: ResumeAudit, trainings: Trainings, steps: range | None = None
) -> tuple[list[LostState], list[ChangedStep]]:
    """Return what differs of two trainings: states before the first judged step, and steps."""
    records = [run.read_states(audit.first.layout.world) for run in trainings]
    changed = changed_steps(steps or audit.steps, (_lines(trainings[0]), _lines(trainings[1])), records)
    return lost_states(*records), changed


def _result(
    audit: ResumeAudit,
    first: AuditedRun,
    lost: list[LostState],
    changed: list[ChangedStep],
    apart: str | None,
    facts: dict[str, Any],
) -> ResumeResult:
    config, states = audit.first.config, first.read_states(1)[0].state
    kinds = [name.partition("/")[0] for name in states]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind != GRAPHS}
    verdict = NOT_JUDGED if apart and not lost else DIFFERS if lost or changed else WHOLE
    words = verdict_line(verdict, audit.steps, counts, lost, changed, apart)
    fault = faults.of_tensor(config, f"{faults.RESUMED}{lost[0].kind}/{lost[0].name}") if lost else None
    facts |= {
        "model": audit.first.composed.model,
        "overrides": [
            text for text in workflow.shown(audit.first.composed) if text not in (*ADDED, f"save={audit.at}")
        ],
        "numerics": config.numerics.mode,
        "layout": audit.first.layout.as_dict(),
        "format": saved_as(config),
        "async_save": bool(config.section("checkpoint").get("async_save")),
        "device": audit.first.device,
        **workflow.made(),
    }
    found = audit.at, audit.steps[-1], counts, tuple(lost), tuple(changed)
    return ResumeResult(audit.directory.path, verdict, words, str(fault) if fault else None, facts, *found)


def _write(audit: ResumeAudit, result: ResumeResult) -> None:
    where = audit.directory
    where.write(where.result, result.as_json())
    if "card" in result.facts:
        ledger = read(where.training(RESUMED).ledger)
        losses = {line.step: bits_float(line.loss) for line in ledger.steps if line.loss is not None}
        device = str(ledger.header.device["name"]) if audit.first.device == "gpu" else "CPU"
        where.write(where.card, result.card_item(device, str(audit.first.config.mixed_precision or "fp32"), losses))
