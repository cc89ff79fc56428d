# SPDX-License-Identifier: Apache-2.0
"""A command of `tpi train`, which starts or resumes a run; and what its directory gets before the ranks start."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, given, texts
from tp_invariant_recipes.errors import ConfigError, RunError
from tp_invariant_recipes.launch import plan, resume, trust
from tp_invariant_recipes.launch.plan import TO_TRAIN, Plan, Planning, restarts_so_far
from tp_invariant_recipes.ledger.run_files import RestartJob, RunFile
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.runs import restarts
from tp_invariant_recipes.runs.run_dir import RunDir, check_free
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.settings.run_config import RunConfig


@dataclass(frozen=True)
class RunRequest:
    """A model to train, or a run to resume. Compose it once, then call `plan`.

    continues: resume the run in run.dir if there is one.
    """

    model: str | None
    overrides: tuple[Override, ...]
    resume: Path | None = None
    continues: bool = False

    @property
    def launcher(self) -> str:
        """What starts the ranks: as typed, not yet checked."""
        requested = given(self.overrides, "launcher.kind")
        return requested.value if requested else "local"

    def composed(self, device: str | None = None) -> Composed:
        """Return the configuration alone. Raises ConfigError; RunError where there is no run to resume.

        device: where neither the overrides nor the run to resume name one; None: this machine's.
        """
        if self.resume is not None:
            if self.continues:
                raise ConfigError(
                    "--resume RUN continues a run wherever it is, --continue with the one in run.dir: give one"
                )
            self._check_run_dir(self.resume)
            return resume.compose_resumed(self.resume, self.model, self.overrides)
        if self.model is None:
            raise ConfigError("name a model to train (tpi models lists them), or a run to continue: --resume RUN")
        # Other machines may have other files, and a run that goes on has read its weights.
        continued = self._continued()
        files = input_problems if self.launcher == "local" and continued is None else None
        # By default the numerics that it has recorded: a job may outlive a release with another default.
        numerics = continued.read_run(RunFile).numerics["mode"] if continued else None
        device = device or plan.detect_device()
        return compose(self.model, self.overrides, device=device, numerics=numerics, also=files)

    def check_new_dir(self) -> None:
        """Before anything is imported. Raises RunError: a new run cannot be written to run.dir."""
        where = self._run_dir()
        if where and not self.resume and not self._continued():
            check_free(where.path)

    def _run_dir(self) -> RunDir | None:
        """run.dir as typed, not yet checked."""
        requested = given(self.overrides, "run.dir")
        named = requested and requested.single and requested.data
        return RunDir(Path(str(named)).expanduser()) if named else None

    def _continued(self) -> RunDir | None:
        """Return the run that --continue finds in run.dir; None: there is none."""
        where = self._run_dir()
        return where if self.continues and where and where.run.exists() else None

    def _check_run_dir(self, run: Path) -> None:
        """Raise ConfigError where run.dir names another directory than the run's own."""
        requested = given(self.overrides, "run.dir")
        where = requested and requested.data
        if requested and (where is None or Path(str(where)).expanduser().resolve() != run.resolve()):
            raise ConfigError(f"--resume {run} goes on in {run}: leave out {requested.text}")

    def plan(self, composed: Composed, how: Planning = TO_TRAIN, *, start: int | None = None) -> Plan:
        """Plan the run. Raises a TpiError. start: the step after which another machine has planned to start it."""
        if self.resume is not None:
            return resume.resume_run(self.resume, composed, how, start=start)
        if self.continues or start is not None:
            return resume.resume_or_start(composed, how, start=start)
        return plan.new(composed, how)

    def words(self) -> list[str]:
        """Return the arguments of `tpi train` for this request."""
        resumed = [] if self.resume is None else ["--resume", str(self.resume.absolute())]
        model = [] if self.model is None else [self.model]
        return [*model, *texts(self.overrides), *resumed, *(["--continue"] if self.continues else [])]


def check_current(plan: Plan) -> None:
    """Raise RunError when another process has trained in the run directory since this was planned."""
    if restarts_so_far(plan.run_dir) != plan.attempts:
        raise RunError(f"another command has begun to train in {plan.run_dir.path} since this one looked there")


def write(plan: Plan, *, attempt: bool = True, job: RestartJob | None = None) -> None:
    """Write configuration, environment, versions and `run.json`. Raises RunError.

    attempt: whether to record a restart; submitting a job is none. job: the SLURM job that makes the restart.
    """
    run_dir = plan.run_dir
    so_far = restarts.read_restarts(run_dir)
    if attempt:
        run_dir.disk_full.unlink(missing_ok=True)
        so_far = (*so_far, restarts.started(plan.start, plan.steps, job, plan.layout.as_dict()))
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
        notes=notes(plan.config),
        attempts=so_far,
    )
    run_dir.write(run_dir.environment, environment.recorded(os.environ | plan.environment))
    run_dir.write(run_dir.versions, versions())
    run_dir.write(run_dir.run, trust.sealed(run, run_dir.config, before))


def notes(config: RunConfig) -> dict[str, Any]:
    """Get what the ledger's header says beside the parts: what was adjusted of a recipe, and the tokenizer's facts."""
    facts: dict[str, Any] = {"adjusted": config.recipe.adjusted} if config.recipe.adjusted else {}
    tokenizer = config.section("tokenizer")
    if tokenizer["tokenizer_type"] != "NullTokenizer":
        return facts
    includes, size = tokenizer["vocab_includes_eod"], tokenizer["vocab_size"]
    eod = tokenizer.get("null_tokenizer_eod_id")
    return facts | {
        "tokenizer.vocab_includes_eod": includes,
        "tokenizer.vocab_size": size,
        "tokenizer.eod": eod if eod is not None else size - includes,
    }
