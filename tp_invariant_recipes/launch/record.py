"""The files that a run directory gets before the ranks start."""

import os
from typing import Any

from tp_invariant_recipes.config.overrides import texts
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch import trust
from tp_invariant_recipes.launch.plan import Plan, attempts_so_far
from tp_invariant_recipes.ledger.run_files import AttemptJob, RunFile
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.runs import attempts
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.settings.run_config import RunConfig


def check_current(plan: Plan) -> None:
    """Raise RunError when another process has trained in the run directory since this was planned."""
    if attempts_so_far(plan.run_dir) != plan.attempts:
        raise RunError(f"another command has begun to train in {plan.run_dir.path} since this one looked there")


def write(plan: Plan, *, attempt: bool = True, job: AttemptJob | None = None) -> None:
    """Write configuration, environment, versions and `run.json`. Raises RunError.

    attempt: whether to record an attempt; submitting a job is none. job: the SLURM job that makes the attempt.
    """
    run_dir = plan.run_dir
    so_far = attempts.read_attempts(run_dir)
    if attempt:
        run_dir.disk_full.unlink(missing_ok=True)
        so_far = (*so_far, attempts.started(plan.start, plan.steps, job, plan.layout.as_dict()))
    before = trust.sealing(run_dir) if job else None
    run_dir.write(run_dir.config, plan.config.sections)
    run = RunFile(
        model=plan.composed.model,
        overrides=tuple(texts(plan.composed.overrides)),
        device=plan.device,
        layout=plan.layout.as_dict(),
        numerics=plan.config.section("numerics"),
        identity=plan.identity,
        identity_hash=plan.identity_hash,
        notes=_notes(plan.config),
        attempts=so_far,
    )
    run_dir.write(run_dir.environment, environment.recorded(os.environ | plan.environment))
    run_dir.write(run_dir.versions, versions())
    run_dir.write(run_dir.run, trust.sealed(run, run_dir.config, before))


def _notes(config: RunConfig) -> dict[str, Any]:
    """Get what the ledger's header says beside the parts: what was adjusted of a recipe, and the tokenizer's facts."""
    notes: dict[str, Any] = {"adjusted": config.recipe.adjusted} if config.recipe.adjusted else {}
    tokenizer = config.section("tokenizer")
    if tokenizer["tokenizer_type"] != "NullTokenizer":
        return notes
    includes, size = tokenizer["vocab_includes_eod"], tokenizer["vocab_size"]
    eod = tokenizer.get("null_tokenizer_eod_id")
    return notes | {
        "tokenizer.vocab_includes_eod": includes,
        "tokenizer.vocab_size": size,
        "tokenizer.eod": eod if eod is not None else size - includes,
    }
