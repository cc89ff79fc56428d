# SPDX-License-Identifier: Apache-2.0
"""Resume a run, or repeat a part of it: the overrides it was made of, and the checks before it continues."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tp_invariant_recipes.comparison import comparability
from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.fingerprint import WEIGHTS_DIGEST, StateForm
from tp_invariant_recipes.config.overrides import DECIDED_BY, Override, given, latest, parse, parse_all
from tp_invariant_recipes.errors import ConfigError, RunError, lines, listed
from tp_invariant_recipes.launch import trust
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning, resolve
from tp_invariant_recipes.launch.ranks import Outcome
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.ledger.stream import last_step
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.runs import checkpoints, restarts
from tp_invariant_recipes.runs.checkpoints import RunCheckpoint, iteration_dir
from tp_invariant_recipes.runs.run_dir import RunDir, choose
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.sections import GuardSettings
from tp_invariant_recipes.settings.values import value_text

# Overrides of one restart and not of the run: the step it resumed from, and what started its ranks.
OF_AN_ATTEMPT = ("checkpoint.ckpt_step", "launcher.kind")
LR_DECAY = "scheduler.lr_decay_iters"
# A repetition also has another directory.
NOT_REPEATED = (*OF_AN_ATTEMPT, "run.dir", *(f"guard.{name}" for name in vars(GuardSettings())))


def resume_run(run: Path, composed: Composed, how: Planning = TO_TRAIN, *, start: int | None = None) -> Plan:
    """Plan to resume a run from its newest finished checkpoint, or from the start if it has none.

    composed: layout and length may differ from the run so far; what makes runs comparable may not.
    start: the step to resume from, which another process has checked (0: from the beginning).
    Raises a TpiError that names the fields, or the damaged files.
    """
    return _resume(f"--resume {run}", RunDir(run), composed, how, start)


def resume_or_start(composed: Composed, how: Planning = TO_TRAIN, *, start: int | None = None) -> Plan:
    """Plan to resume the run in `run.dir` if one is there, else to start it there.

    For a command that a scheduler may repeat. start: as for `resume_run`. Raises a TpiError.
    """
    where = composed.config.run.dir
    if where is None:
        raise ConfigError("--continue needs the directory to go on in, or to begin in: run.dir=PATH")
    run_dir = RunDir(Path(where).expanduser())
    if run_dir.run.exists():
        return _resume(f"--continue run.dir={where}", run_dir, composed, how, start)
    return resolve(composed, choose(where, composed.model), how)


def rerun(
    run: Path,
    run_dir: RunDir,
    start: RunCheckpoint | None,
    *,
    last_step: int,
    record: Sequence[str] = (),
) -> Plan:
    """Plan to repeat a run in a directory of its own, up to `last_step` at least, as it last was, without checkpoints.

    start:  a finished checkpoint of that run; None: from the beginning.
    record: overrides of what the ledger records.
    Raises a TpiError: this machine cannot carry it, or it would be another run.
    """
    before = RunDir(run).read_run(RunFile)
    trust.require(run, before, RunDir(run).config, NOT_REPEATED)
    # The length stays: how often Megatron goes through the text, and in which order, depends on it. Bridge leaves
    # without a word to callbacks, so the ledger has the digests of a step only if another one follows.
    shorter = f"train.exit_interval={last_step + 1}"
    changes = [*record, "save=0", "logging=none", shorter, "train.exit_duration_in_mins=null"]
    composed = _compose_as(before, [*_recorded(before, NOT_REPEATED), *parse_all(changes)])
    imported = _imported(before, composed) if start else None
    plan = resolve(composed, run_dir, imported=imported)
    if changes := _changes(before.identity, plan.identity):
        raise RunError(f"{run} cannot be repeated: it would be another run now.\n{listed(changes)}")
    plan = replace(plan, config=plan.config.with_fields("checkpoint", save=None))
    return plan if start is None else _starting_at(plan, start)


def compose_resumed(run: Path, model: str | None, overrides: Sequence[Override]) -> Composed:
    """Compose a run with its recorded overrides and these. Raises ConfigError, RunError."""
    before = RunDir(run).read_run(RunFile)
    typed_model = resumes_model(run, model, before)
    return _compose_as(before, overrides_to_continue(RunDir(run), before, overrides, typed_model=typed_model))


def resumes_model(run: Path, model: str | None, before: RunFile) -> bool:
    """Whether the command line names the model of the run to resume. Raises ConfigError where it names another one."""
    if model not in (None, before.model):
        raise ConfigError(f"--resume {run} is a run of {before.model}, not of {model}")
    return model is not None


def _compose_as(before: RunFile, overrides: Sequence[Override]) -> Composed:
    """Compose with the device and numerics of an earlier restart, whatever the defaults are here and now."""
    return compose(before.model, latest(overrides), device=before.device, numerics=before.numerics["mode"])


def overrides_to_continue(
    run_dir: RunDir, before: RunFile, typed: Sequence[Override], *, typed_model: bool = False
) -> list[Override]:
    """Return the overrides that continue a run, typed ones last.

    before: its `run.json`. typed, typed_model: as for `trust.require`, which raises ConfigError.
    """
    without = [*OF_AN_ATTEMPT, *(override.path for override in typed)]
    trust.require(run_dir.path, before, run_dir.config, without, typed_model=typed_model)
    mode_typed = given(typed, "numerics.mode")
    numerics = before.numerics | ({"mode": mode_typed.value} if mode_typed else {})
    kept = parse_all(fingerprint.kept(numerics))  # another layout has other defaults
    return latest([*_recorded(before, OF_AN_ATTEMPT), *kept, *typed])


def overrides_to_repeat(run_dir: RunDir, before: RunFile, typed: Sequence[Override]) -> list[Override]:
    """Return the overrides that repeat a run elsewhere, including its device and numerics. Raises ConfigError.

    before: its `run.json`. typed: those beside them, as for `trust.require`.
    """
    trust.require(run_dir.path, before, run_dir.config, [*NOT_REPEATED, *(override.path for override in typed)])
    return with_groups(before, _recorded(before, NOT_REPEATED))


def with_groups(before: RunFile, overrides: Sequence[Override]) -> list[Override]:
    """Return the overrides with a run's device and numerics, where they name none."""
    decided = {"device": before.device, "numerics": before.numerics["mode"]}
    missing = {
        group: option for group, option in decided.items() if not given(overrides, f"{group}.{DECIDED_BY[group]}")
    }
    return [*(parse(f"{group}={option}") for group, option in missing.items()), *overrides]


def _recorded(before: RunFile, without: Sequence[str]) -> list[Override]:
    """Return the overrides that a run was made of, but for some fields."""
    return [override for override in parse_all(before.overrides) if override.field not in without]


def _resume(command: str, run_dir: RunDir, composed: Composed, how: Planning, start: int | None) -> Plan:
    """command: its words, for messages. start: as for `resume_run`."""
    before = run_dir.read_run(RunFile)
    if composed.model != before.model:
        raise ConfigError(f"{command} is a run of {before.model}, not of {composed.model}")
    imported = _imported(before, composed) if start or _newest(run_dir) else None
    plan = resolve(composed, run_dir, how, imported=imported)
    if plan.data_missing:
        plan.identity["data.digest"] = before.identity.get("data.digest")  # not known before it is prepared
    step, iters = plan.config.section("checkpoint")["ckpt_step"], plan.config.train["train_iters"]
    newest = start is None and step is None
    done = completed_steps(run_dir) if newest else None
    problems = _changes(before.identity, plan.identity, composed.overrides)
    problems += lines(fingerprint.other_state(parse_all(before.overrides), composed.overrides, plan.config))
    reached = done or (_newest(run_dir) if newest else step or 0)
    if reached > iters:
        problems.append(f"iters={iters}: the run goes on at step {reached}; raise iters, or checkpoint.ckpt_step=STEP")
    if problems:
        raise RunError(f"{command} would continue another run.\n{listed(problems)}")
    if done == iters:
        return replace(plan, start=iters, completed=True)
    if start is not None:
        return _starting_at(plan, RunCheckpoint(iteration_dir(run_dir.checkpoints, start), start)) if start else plan
    checkpoint = _checkpoint(plan, step)
    if checkpoint is None:
        return plan
    _check_layout(command, before, plan, checkpoint)
    return replace(_starting_at(plan, checkpoint), remark=_changed_arithmetic(plan, checkpoint.step))


def _checkpoint(plan: Plan, step: int | None) -> RunCheckpoint | None:
    """Return the checkpoint of a step, or the newest that can be trusted.

    Raises CheckpointError: it is of another run.
    """
    run_dir = plan.run_dir
    untrusted, within = checkpoints.unsettled(run_dir), _steps_in_ledger(run_dir)
    if untrusted is not None:  # whoever noted it was killed before the checkpoints were moved
        within = min(within, untrusted.trusted)
    hash_ = plan.identity_hash
    return checkpoints.select(run_dir.checkpoints, step, within=within, hashes=False, identity_hash=hash_)


def completed_steps(run_dir: RunDir) -> int | None:
    """Return the steps of a run whose last restart completed; None: it did not, or the ledger lacks its last step."""
    *_, last = (None, *restarts.read_restarts(run_dir))
    with suppress(OSError, ValueError):  # a ledger that cannot be read is refused later, with the reason
        if last and last.outcome == Outcome.COMPLETED.value and last_step(run_dir.ledger).step == last.to_step:
            return last.to_step
    return None


def completed_text(plan: Plan) -> str:
    """Why a completed run is not trained, and the command that trains it for longer."""
    iters, run = plan.config.train["train_iters"], plan.run_dir.path
    follows = plan.config.section("scheduler").get("lr_decay_iters") is None
    schedule = f" scheduler.lr_decay_iters={iters}" if follows else ""
    return (
        f"{run} completed at step {iters} of {iters}: no step is left to train. iters=N goes on at step "
        f"{_newest(plan.run_dir)}: {shlex.join(['tpi', 'train', '--resume', str(run)])} iters=N{schedule}"
    )


def _newest(run_dir: RunDir) -> int:
    """Return the step of the newest finished checkpoint that the ledger reaches; 0: there is none."""
    recorded = _steps_in_ledger(run_dir)
    return max((c.step for c in checkpoints.finished(run_dir.checkpoints) if c.step <= recorded), default=0)


def _imported(before: RunFile, composed: Composed) -> str | None:
    """Return the digest of the weights that a run has started from, if the same are requested.

    None: tpi has to read them. Checkpoints of adapters have no others.
    """
    if finetuning.adapts(composed.config):
        return None
    now, then = (given(texts, "weights.folder") for texts in (composed.overrides, parse_all(before.overrides)))
    same = (now and now.value) == (then and then.value)
    return before.identity.get(WEIGHTS_DIGEST) if same else None


def _steps_in_ledger(run_dir: RunDir) -> int:
    """Complete steps. A node that dies can take its last lines with it, when the checkpoint is already whole."""
    return sum(1 for _ in streamed(run_dir.ledger).steps) if run_dir.ledger.exists() else 0


def _changes(before: dict[str, Any], now: dict[str, Any], overrides: Sequence[Override] = ()) -> list[str]:
    """Each field of the identity that has changed, with the key that restores it."""
    return [
        f"{key} was {before.get(key)} and is {now.get(key)} now; {_remedy(key, before.get(key), overrides)}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def _remedy(key: str, value: Any, overrides: Sequence[Override]) -> str:
    """Return the override that gives a field of the identity its earlier value."""
    override = given(overrides, key) or next(
        (override for override in overrides if key.startswith(f"{override.path}.")), None
    )
    if key == "data.digest":
        return "data.path, data.tokenizer and data.json_key (dataset.dataset_root, tokenizer) must give the same tokens"
    if key == WEIGHTS_DIGEST:
        return "weights must name a folder with the same tensors" if value else "leave out weights"
    if override is not None and override.value != value_text(value):
        return f"leave out {override.text}, or set {key}={value_text(value)}"
    if key == LR_DECAY:
        return f"set {key}={value_text(value)} (unset, it follows iters, and every step's learning rate follows it)"
    return f"set {key}={value_text(value)}"


def _check_layout(command: str, before: RunFile, plan: Plan, checkpoint: RunCheckpoint) -> None:
    """Raise ConfigError: in this layout later steps would not be bitwise identical, or the checkpoint cannot be
    read."""
    degrees, manifest = plan.layout.as_dict(), checkpoint.read_manifest()
    separate = fingerprint.experts_separate(plan.config.numerics.mode, plan.config.model, degrees)
    now = {"numerics": plan.config.section("numerics"), "layout": degrees}
    saved = StateForm(manifest.optimizer_state, manifest.layout, manifest.separate_experts)
    wanted = StateForm(fingerprint.optimizer_state(plan.config), degrees, separate)
    problems = fingerprint.unreadable_state(str(checkpoint.path), saved, wanted)
    if wrong := lines([*fingerprint.other_gradients(vars(before), now), *problems]):
        raise ConfigError(f"{command} cannot go on at step {checkpoint.step} in this layout.\n{listed(wrong)}", wrong)


def _changed_arithmetic(plan: Plan, step: int) -> str | None:
    """Get a sentence if products have another definition after `step` than before, or a CPU has other instructions."""
    version = mode.definition(plan.config.numerics.mode, plan.device)
    header = streamed(plan.run_dir.ledger).header
    changed = comparability.changed_gemms(header, version, step) if version else None
    if plan.device == "cpu" and plan.here and changed is None:
        return comparability.changed_processor(header, processor.capability(), step)
    return changed


def _starting_at(plan: Plan, checkpoint: RunCheckpoint) -> Plan:
    """Return the plan, starting at a checkpoint of a run with the same identity."""
    # The identity is the same, so the checkpoint's schedule is this run's: Megatron would refuse a longer run over the
    # number of steps alone.
    schedule = {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": False}
    config = plan.config.with_fields("scheduler", **schedule)
    state = fingerprint.WHOLE | {
        "load_rng": fingerprint.same_random_states(checkpoint.read_manifest().layout, plan.layout.as_dict())
    }
    config = config.with_fields("checkpoint", ckpt_step=checkpoint.step, load=str(checkpoint.path.parent), **state)
    return replace(plan, config=config, start=checkpoint.step)
