# SPDX-License-Identifier: Apache-2.0
"""`tpi audit MODEL --all`: audit the layouts and options that a model allows, in configurations that cover each pair
once."""

import json
import multiprocessing
import os
import random
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts import machine
from tp_invariant_recipes.config.overrides import check_reserved, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, TpiError, refuse
from tp_invariant_recipes.features.audit import configurations, resume, script, workflow
from tp_invariant_recipes.features.audit.configurations import Configuration, Configurations, Covering, shrunk
from tp_invariant_recipes.features.audit.result import BEYOND, FAILED, AuditRun, CampaignResult, ShrunkFault
from tp_invariant_recipes.launch import plan, train
from tp_invariant_recipes.launch.ranks import interruptible
from tp_invariant_recipes.machine import processor
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.reading import checked
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.run_dir import RunDir, choose_for_several
from tp_invariant_recipes.runs.sweep_dir import CampaignDir
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.start import forking

RANKS = 4  # at most, of a configuration
OnTrial = Callable[[AuditRun, int, int], None]


@dataclass
class State:
    """What `audits.json` holds of a campaign: all that --resume needs."""

    model: str
    overrides: list[str]
    trials: list[AuditRun] = field(default_factory=list)
    findings: list[ShrunkFault] = field(default_factory=list)
    resume_at: int | None = None


class Campaign:
    """All audits of a model in a directory.

    on_trial: is told of every verdict as it comes, how many pairs of settings are covered, and of how many.
    scripts: write a program for each fault that a layer alone has.
    """

    def __init__(self, where: CampaignDir, state: State, on_trial: OnTrial, *, scripts: bool) -> None:
        self.where, self.state, self._on_trial, self._scripts = where, state, on_trial, scripts
        self._refused: dict[Configuration, str] = {}  # -> why
        self._begun: dict[tuple[str, ...], Future[AuditRun | None]] = {}  # by settings
        self._directories = max((int(path.name) for path in where.trial(0).parent.glob("*")), default=0)
        self._cells = Configurations(state.model, state.overrides, where.texts, plan.detect_device())
        self._covering = Covering(self._cells.axes, len(configurations.LAYOUTS), self._allowed)

    def run(self, *, exitfirst: bool = False) -> CampaignResult:
        """Audit all configurations, and judge them in the order of the plan. Interrupted: Ctrl-C, SIGTERM.

        exitfirst: end with the first fault that is not known.
        """
        begun, number = time.monotonic(), self._concurrent()
        for earlier in self.state.trials:
            self._begun[earlier.settings] = Future()
            self._begun[earlier.settings].set_result(earlier)
            if earlier.covers:
                self._covering.cover(frozenset(earlier.settings))
        ahead: list[Configuration] = []
        with workers(number) as self._workers:
            while self._fill(ahead, 2 * number - 1):  # one more than run: a core that is done has the next
                if not self._allowed(cell := ahead.pop(0)):  # for a fault that has been found since
                    continue
                trial = self._audited(cell)
                if trial is None:
                    self._refuse(cell)
                elif trial.covers:
                    self._covering.cover(cell)
                else:
                    self._record(*self._shrunk(cell, trial))
                if exitfirst and any(finding.trial.known is None for finding in self.state.findings):
                    break
        return self._write(round(time.monotonic() - begun, 1))

    def _concurrent(self) -> int:
        """Return how many audits run at a time: two where there are cores and memory for them. GPUs belong to one."""
        cores, free = len(os.sched_getaffinity(0)), processor.available()
        fit = free is None or 2 * RANKS * memory.estimate(self._cells.base).rank <= free
        return 2 if self._cells.base.device.kind == "cpu" and cores > 1 and fit else 1

    def _fill(self, ahead: list[Configuration], most: int) -> bool:
        """Begin the next audits, as if those ahead of them will find nothing; whether there are any."""
        lock.check()
        while len(ahead) < most and (cell := self._covering.next(ahead)) is not None:
            self._begin(cell)
            ahead.append(cell)
        return bool(ahead)

    # --- which configurations ---

    def _allowed(self, cell: Configuration) -> bool:
        """Whether a run may have these settings, has a reference that is another one, and no fault that is found
        already."""
        wrong = (*self._refused, *(set(finding.settings) for finding in self.state.findings))
        if not self._covering.changes_layout(cell) or any(settings <= cell for settings in wrong):
            return False
        config = self._cells.configured(cell)
        if config is None or config.layout.world > RANKS:
            return False
        if self.state.resume_at is not None and resume.saved_as(config) != resume.READ:
            return False  # as Megatron-FSDP's: a campaign would try it with every other setting
        named = {finding.trial.known for finding in self.state.findings}
        return not any(str(fault) in named for fault in faults.shown(config))

    def _refuse(self, cell: Configuration) -> None:
        """Note the smallest part of a configuration that Bridge refuses; none that has it is tried.

        ConfigError: Bridge refuses the model without any setting.
        """
        reasons = self._problems(cell)
        if not (small := shrunk(cell, lambda part: bool(reasons.keys() & self._problems(part)))):
            refuse([*reasons])
        self._refused[small] = next(iter(reasons), "an audit of it cannot be planned")

    def _problems(self, cell: Configuration) -> dict[str, None]:
        """Return why Bridge, or a check of this machine, refuses a training with these settings.

        RunError: the disk is full, which is no property of the settings.
        """
        try:
            with redirect_stdout(StringIO()):
                composed = self._cells.composed([*self._cells.sizes, *self._cells.words(cell)])
                train.check(plan.resolve(composed, RunDir(self.where.trial(self._directories))))
        except ConfigError as error:
            if full := [problem for problem in error.problems if getattr(problem, "rule", "") == machine.DISK.name]:
                raise RunError(f"{full[0]}; then tpi audit --resume {self.where.path}") from error
            return dict.fromkeys(error.problems)
        return {}

    # --- audits ---

    def _begin(self, cell: Configuration, sizes: tuple[str, ...] = ()) -> Future[AuditRun | None]:
        """Begin the audit of a configuration, unless it has begun. sizes: overrides smaller than the campaign's."""
        settings = (*sizes, *self._cells.settings(cell))
        if settings not in self._begun:
            self._directories += 1
            words = [*self._cells.sizes, *self.state.overrides, *self._cells.words(cell), *sizes]
            more = self.where.trial(self._directories), self.state.resume_at
            self._begun[settings] = self._workers.submit(audited, self.state.model, words, settings, *more)
        return self._begun[settings]

    def _audited(self, cell: Configuration, sizes: tuple[str, ...] = ()) -> AuditRun | None:
        """Return the audit of a configuration, and record it; None: no run may have it."""
        trial = self._begin(cell, sizes).result()
        if trial is not None and trial not in self.state.trials:
            self.state.trials.append(trial)
            self._write()
            self._on_trial(trial, self._covering.total - len(self._covering.pending), self._covering.total)
        return trial

    def _shrunk(self, cell: Configuration, trial: AuditRun) -> tuple[Configuration, AuditRun]:
        """Return the smallest configuration with a fault. The table says what a known fault needs, and one audit
        confirms it."""
        if trial.known is not None:
            small = shrunk(cell, partial(self._meets, known=trial.known))
            confirmed = trial if small == cell else self._audited(small)
            if confirmed is not None and confirmed.known == trial.known:
                return small, confirmed
        return shrunk(cell, partial(self._fails_alike, trial=trial)), trial

    def _meets(self, cell: Configuration, known: str) -> bool:
        """Whether a known fault strikes a run with these settings."""
        config = self._cells.configured(cell) if self._allowed(cell) else None
        return config is not None and any(str(fault) == known for fault in faults.shown(config))

    def _fails_alike(self, cell: Configuration, trial: AuditRun) -> bool:
        smaller = self._audited(cell) if self._allowed(cell) else None
        if smaller is None:
            return False
        if smaller.sound:
            self._covering.cover(cell)
        return smaller.same_fault(trial)

    def _record(self, cell: Configuration, trial: AuditRun) -> None:
        """Record a fault; configurations with all of its settings are not tried again."""
        sizes = self._cells.sizes
        if not any(setting.startswith("pp=") for setting in cell) and self._cells.base.shape.layers == 2:
            less = ["model.num_layers=1"] if not self._cells.base.model.get("moe_layer_freq") else []
            if less and (smaller := self._audited(cell, tuple(less))) is not None and smaller.same_fault(trial):
                sizes = [*(size for size in sizes if "num_layers" not in size), *less]
        smallest = next(t for t in reversed(self.state.trials) if t.same_fault(trial))
        resume = [] if self.state.resume_at is None else ["--resume-at", str(self.state.resume_at)]
        words = [*self.state.overrides, *sizes, *self._cells.words(cell), *resume]
        command = shlex.join(["tpi", "audit", self.state.model, *words])
        program = self._script(sizes, cell, smallest)
        self.state.findings.append(ShrunkFault(self._cells.settings(cell), smallest, command, program))
        self._covering.cover(cell)
        self._write()

    def _script(self, sizes: Sequence[str], cell: Configuration, trial: AuditRun) -> str | None:
        """Write the program of a fault, if it is wanted and a layer has the fault; return its path."""
        if not self._scripts or trial.verdict != BEYOND:
            return None
        small = self._cells.composed([*sizes, *self._cells.words(cell)]).config
        program = script.text(small, [*cell], trial.first)
        if program is None:
            return None
        file = self.where.path / f"fault-{len(self.state.findings) + 1}.py"
        self.where.write_text(file, program)
        return str(file)

    def _write(self, seconds: float | None = None) -> CampaignResult:
        result = CampaignResult(
            directory=self.where.path,
            model=self.state.model,
            overrides=tuple(self.state.overrides),
            sizes=tuple(self._cells.sizes),
            pairs=self._covering.total,
            pending=len(self._covering.pending),
            seconds=seconds,
            refused=self._cells.refused | {" ".join(self._cells.settings(c)): why for c, why in self._refused.items()},
            trials=tuple(self.state.trials),
            findings=tuple(self.state.findings),
            resume_at=self.state.resume_at,
        )
        self.where.write(self.where.result, result.as_json())
        return result


def new(
    model: str, overrides: Sequence[str], directory: Path | None, at: int | None = None
) -> tuple[CampaignDir, State]:
    """Return a campaign that begins. at: the step at which trainings resume. ConfigError: an override is wrong."""
    typed = parse_all(overrides)
    problems, sound = check_reserved("audit", typed) if at is None else resume.requested(typed, at)
    refuse(problems)
    where = CampaignDir(choose_for_several(directory, f"audits-{model}"))
    return where, State(model, [*texts(sound)], resume_at=at)


def resumed(directory: Path) -> tuple[CampaignDir, State]:
    """Return a campaign that goes on. RunError: this is no directory of one."""
    where = CampaignDir(directory)
    data = where.read_result()
    try:
        trials = checked(list[AuditRun], data["trials"])
        return where, State(data["model"], data["overrides"], trials, resume_at=data.get("resume_at"))
    except (KeyError, ValueError) as error:
        raise RunError(f"{where.result}: {error}") from error


def execute(
    where: CampaignDir,
    state: State,
    on_trial: OnTrial,
    *,
    resume: bool,
    exitfirst: bool = False,
    scripts: bool = False,
) -> CampaignResult:
    """Run a campaign to its end. Interrupted: Ctrl-C; what it has done is kept for --resume."""
    with (lock.locked if resume else lock.locked_empty)(where), interruptible():
        _write_texts(where.texts)
        try:
            return Campaign(where, state, on_trial, scripts=scripts).run(exitfirst=exitfirst)
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted(f"stopped after {len(state.trials)} audits; tpi audit --resume {where.path}") from None
        except ConfigError:
            if not state.trials:  # the model or an override is refused; nothing was done
                shutil.rmtree(where.path)
            raise


@contextmanager
def workers(number: int) -> Iterator[Executor]:
    """Start processes that audit, since audits differ in their environment; end them, and their ranks, at the end."""
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), forking.serve_starter)
    try:
        yield pool
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)


def audited(
    model: str, words: Sequence[str], settings: tuple[str, ...], where: Path, at: int | None = None
) -> AuditRun | None:
    """Audit the overrides `words`, whose configuration has `settings`; None: no run may have them.

    at: audit a resume at this step instead. Interrupted: a signal ended it.
    """
    begun = time.monotonic()
    facts = dict[str, Any](first=None)
    try:
        with redirect_stdout(StringIO()):
            judge: Any = workflow if at is None else resume
            planned = judge.new(model, words, **({} if at is None else {"at": at}), directory=where)
            judge.check(planned)
    except ConfigError:
        return None
    try:
        result = judge.execute(planned, lambda *_: nullcontext(lambda: None))  # a line a configuration is enough
        verdict, text = result.verdict, result.words.partition(": ")[2]
        facts["known"] = result.known
        if at is not None:
            facts["first"] = next((f"{state.kind} {state.name}" for state in result.lost), None)
        elif first := result.first:
            facts |= {
                "first": f"{first.kind} {first.module}",
                "size": first.size,
                "reference": first.rms,
                "ranks": f"{', '.join(map(str, first.ranks))} of {first.all_ranks}",
            }
    except (Interrupted, workflow.StoppedAudit):
        raise Interrupted from None
    except TpiError as error:
        verdict, text = FAILED, str(error).replace("so that nothing can be compared\n", "")
    for name in (*workflow.TRAININGS, *resume.TRAININGS):
        shutil.rmtree(where / name, ignore_errors=True)
    return AuditRun(settings, verdict, text, seconds=round(time.monotonic() - begun, 1), **facts)


def _write_texts(folder: Path) -> None:
    """Write many documents of a letter, then a long one: their ends, which are masked, lie unevenly."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [length for _ in range(200) for length in (*[1] * draw.randint(4, 12), draw.randint(20, 40))]
    letters = [[chr(draw.randint(97, 122)) for _ in range(length)] for length in lengths]
    text = "\n".join(json.dumps({"text": "".join(document)}) for document in letters)
    (folder / "texts.jsonl").write_text(text + "\n")
