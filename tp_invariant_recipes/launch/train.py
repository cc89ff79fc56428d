# SPDX-License-Identifier: Apache-2.0
"""A planned run of one machine: check it with Bridge, write its run directory, run its ranks."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.data.examples import try_tokens
from tp_invariant_recipes.errors import RunError, TpiError
from tp_invariant_recipes.launch import local, record, resume
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import RankFn, Stop
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.runs import checkpoints, restarts
from tp_invariant_recipes.runs.checkpoints import RunCheckpoint, iteration_dir
from tp_invariant_recipes.runs.lock import Lock, LockLost, locked
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment, finetuning
from tp_invariant_recipes.sources import recipe_layer, recipe_process, recipe_source
from tp_invariant_recipes.start.bridge import quiet


@contextmanager
def locked_run(request: RunRequest, composed: Composed) -> Iterator[Lock | None]:
    """Hold the lock of the run to continue while it is planned and trained. Raises RunError: another process has it.

    None: a new run, which `execute` locks, or a completed one, in which nothing is written.
    """
    where = request.resume or (composed.config.run.dir if request.continues else None)
    run_dir = RunDir(Path(where).expanduser()) if where else None
    if run_dir is None or not run_dir.run.exists() or _is_completed(run_dir, composed):
        yield None
        return
    with locked(run_dir) as lock:
        yield lock


def _is_completed(run_dir: RunDir, composed: Composed) -> bool:
    step = composed.config.section("checkpoint").get("ckpt_step")
    return step is None and resume.completed_steps(run_dir) == composed.config.train["train_iters"]


def check(planned: Plan) -> str:
    """Check what can be checked before anything is written. Raises ConfigError, CheckpointError.

    Returns what the user should know of the run's examples, "" if nothing.
    """
    check_checkpoint(planned)
    return validate(planned, examples=finetuning.is_sft(planned.config.section("dataset")))


def check_checkpoint(planned: Plan, node: int = 0, nodes: int = 1) -> None:
    """Read the checkpoint that the run goes on from, whose sizes its plan has checked. Raises CheckpointError.

    node, nodes: this one's number, and how many read it at once, each a part of its files.
    """
    config = planned.config
    if planned.here and planned.start and config.run.verify == "hashes":
        path = iteration_dir(Path(config.section("checkpoint")["load"]), planned.start)
        RunCheckpoint(path, planned.start).verify(node=node, nodes=nodes)


def validate(planned: Plan, *, examples: bool = False) -> str:
    """Let Bridge validate the run's ConfigContainer (seconds, unless the recipe has passed). Raises ConfigError.

    examples: let Bridge make tokens of the examples, too. Returns what the user should know of them.
    """
    model, config = planned.composed.model, planned.config
    typed = tuple(sorted({override.path for override in planned.composed.overrides}))

    def built() -> str:
        with quiet():
            recipe_layer.enter(config.recipe)
            bridges = container.build(config)
            container.validate(bridges, planned.layout.world, here=planned.here, typed=typed)
            return try_tokens(bridges.dataset, bridges.tokenizer) if examples else ""

    with environment.applied(planned.environment if planned.here else {}):
        if not recipe_source.is_recipe(model):
            return built()
        run = planned.run_dir.path
        sections = json.dumps(config.sections, default=str).replace(
            str(run), "run.dir" if not run.exists() else str(run)
        )
        data = planned.identity["data.digest"] if examples else None
        recorded = environment.recorded(os.environ)
        question = ("check", sections, planned.layout.world, planned.here, typed, data, recorded)
        return recipe_process.ask(model, built, *question, hf_folder=config.recipe.hf_folder)


def execute(planned: Plan, watch: Callable[[], None], stop: Stop | None = None, *, rank_fn: RankFn) -> local.Outcome:
    """Write the run directory and train. RunError: another process trains there, a rank dies or hangs, steps lack.

    watch: called while the ranks live. stop, rank_fn: of `local.run`; without `stop` Ctrl-C is raised.
    """
    if planned.completed:
        return local.Outcome.COMPLETED
    with locked(planned.run_dir):
        record.check_current(planned)
        checkpoints.quarantine(planned.run_dir.checkpoints, after=planned.start)
        checkpoints.settle(planned.run_dir)
        record.write(planned)
        try:
            outcome = check_completed(planned, local.run(planned, watch, rank_fn=rank_fn, stop=stop))
        except LockLost:
            raise
        except TpiError as error:
            with suppress(TpiError):  # a full disk, mostly: then the run's own error says so
                checkpoints.settle(planned.run_dir)
                restarts.end(planned.run_dir, "failed", str(error))
            raise
        except KeyboardInterrupt:
            restarts.end(planned.run_dir, local.Outcome.STOPPED.value)
            raise
        restarts.end(planned.run_dir, outcome.value)
        return outcome


def check_completed(planned: Plan, outcome: local.Outcome) -> local.Outcome:
    """How a run ended whose ranks all ended well. Raises RunError: before its last step, and nobody asked for it.

    Bridge leaves early with status 0 after train.exit_duration_in_mins, and on a signal that a rank got by itself.
    """
    if outcome is not local.Outcome.COMPLETED:
        return outcome
    run_dir, minutes = planned.run_dir, planned.config.train.get("exit_duration_in_mins")
    steps = streamed(run_dir.ledger).steps if run_dir.ledger.exists() else ()
    reached = steps[-1].step if steps else 0
    if planned.last_recorded <= reached <= planned.steps:
        return outcome
    reason = f"; train.exit_duration_in_mins={minutes}" if minutes else f"; the reason is in {run_dir.bridge_log}"
    raise RunError(
        f"the ranks ended at step {reached} of {planned.steps}, and nothing had failed{reason}\n"
        f"continue with: tpi train --resume {run_dir.path}"
    )
