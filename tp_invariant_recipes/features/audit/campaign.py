# SPDX-License-Identifier: Apache-2.0
"""`tpi audit MODEL --all`: audit the layouts and options that a model allows, in configurations that cover each pair
once."""

import json
import random
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tp_invariant_recipes.check.configuration import check
from tp_invariant_recipes.config.overrides import check_reserved, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, refuse
from tp_invariant_recipes.features.audit import configurations, rank, resume, script, workflow
from tp_invariant_recipes.features.audit.audit_run import ConcurrentRuns, audited, concurrency
from tp_invariant_recipes.features.audit.configurations import Configuration, Configurations, Covering, shrunk
from tp_invariant_recipes.features.audit.result import BEYOND, AuditRun, CampaignResult, ShrunkFault
from tp_invariant_recipes.launch import plan, ranks
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.reading import checked
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.runs.sweep_dir import AuditedRun, CampaignDir

RANKS = 4  # at most, of a configuration
OnTrial = Callable[[AuditRun, int, int], None]
Job = tuple[Configuration, tuple[str, ...]]  # a configuration, and sizes smaller than the campaign's


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
        self._device = plan.detect_device()
        self._refused: set[Configuration] = set()
        self._references: dict[str, AuditedRun] = {}
        self._ended: list[tuple[Job, AuditRun | None]] = []  # and not judged yet
        self._cell: Configuration | None = None  # that is judged
        self._directories = max((int(path.name) for path in where.trial(0).parent.glob("*")), default=0)
        self._cells = Configurations(state.model, state.overrides, where.texts, self._device)
        self._covering = Covering(self._cells.axes, len(configurations.LAYOUTS), self._allowed, self._ranks_of)

    def run(self, *, exitfirst: bool = False) -> CampaignResult:
        """Audit all configurations, some at a time. Interrupted: Ctrl-C, SIGTERM.

        exitfirst: end with the first fault that is not known.
        """
        begun = time.monotonic()
        self._prepare()
        for trial in self.state.trials:  # of an earlier start
            if trial.covers:
                self._covering.cover(frozenset(trial.settings))
        with ranks.stopping() as stop:
            self._running = ConcurrentRuns(stop)
            try:
                while self._step():
                    if exitfirst and any(finding.trial.known is None for finding in self.state.findings):
                        break
            finally:
                self._running.end()
        return self._write(round(time.monotonic() - begun, 1))

    def _step(self) -> bool:
        """Judge the configuration of an audit that has ended, or wait for one; False: all is done."""
        self._fill()
        if self._ended:
            (self._cell, _), trial = self._ended.pop(0)
            self._judge(self._cell, trial)
            self._cell = None
            return True
        if not len(self._running):
            return False
        self._ended.append(self._next())
        return True

    def _fill(self) -> None:
        """Begin the next audits, as if those that are not judged yet were right."""
        while len(self._running) < concurrency(self._device):
            jobs = (*self._running.keys, *(job for job, _ in self._ended))
            cell = self._covering.next([*([self._cell] if self._cell else []), *(cell for cell, _ in jobs)])
            if cell is None:
                return
            if (recorded := self._recorded((cell, ()))) is not None:
                self._ended.append(((cell, ()), recorded))
            else:
                self._start((cell, ()))

    def _judge(self, cell: Configuration, trial: AuditRun | None) -> None:
        """Cover what a configuration has shown, or shrink its fault, unless an earlier finding has the fault."""
        if trial is None:
            self._refused.add(cell)
        elif trial.covers:
            self._covering.cover(cell)
        elif self._allowed(cell):
            self._record(*self._shrunk(cell, trial))

    def _prepare(self) -> None:
        """Import and check here what each audit's process would otherwise do first."""
        rank.prepare()
        layouts = [setting for axis in self._cells.axes[: len(configurations.LAYOUTS)] for setting in axis]
        words = [*self._cells.sizes, *self.state.overrides, *self._cells.words(frozenset(layouts[:1]))]
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()), suppress(ConfigError):
            workflow.check(workflow.new(self.state.model, words, directory=Path(folder) / "plan"))

    # --- which configurations ---

    def _ranks_of(self, setting: str) -> int:
        return 2 if setting[:3] in ("tp=", "pp=", "cp=", "dp=") else 1

    def _allowed(self, cell: Configuration) -> bool:
        """Whether a run may have these settings, and no fault that is found already is among them."""
        if cell in self._refused or any(set(finding.settings) <= cell for finding in self.state.findings):
            return False
        config = self._cells.configured(cell)
        if config.layout.world > RANKS or check(config):
            return False
        if self.state.resume_at is not None and resume.saved_as(config) != resume.READ:
            return False  # as Megatron-FSDP's: a campaign would try it with every other setting
        named = {finding.trial.known for finding in self.state.findings}
        return not any(str(fault) in named for fault in faults.shown(config))

    # --- audits ---

    def _recorded(self, job: Job) -> AuditRun | None:
        settings = (*job[1], *self._cells.settings(job[0]))
        return next((trial for trial in self.state.trials if tuple(trial.settings) == settings), None)

    def _start(self, job: Job) -> None:
        """Begin an audit in a process of its own."""
        cell, sizes = job
        self._directories += 1
        words = [*self._cells.sizes, *self.state.overrides, *self._cells.words(cell), *sizes]
        settings, where = (*sizes, *self._cells.settings(cell)), self.where.trial(self._directories)
        audit = partial(audited, self.state.model, words, settings, where, {**self._references})
        self._running.start(job, partial(audit, at=self.state.resume_at))

    def _next(self) -> tuple[Job, AuditRun | None]:
        """Wait for the end of an audit, and record it."""
        job, (trial, trained) = self._running.next()
        self._references |= trained
        if trial is not None:
            self.state.trials.append(trial)
            self._write()
            total = self._covering.total
            self._on_trial(trial, total - len(self._covering.pending), total)
        return job, trial

    def _audited(self, cell: Configuration, sizes: tuple[str, ...] = ()) -> AuditRun | None:
        """Return the audit of a configuration, which may be recorded from an earlier start; None: no run may have
        it."""
        job, most = (cell, sizes), concurrency(self._device)
        while not self._recorded(job) and job not in self._running.keys and len(self._running) >= most:
            self._ended.append(self._next())
        if (recorded := self._recorded(job)) is not None:
            return recorded
        if job not in self._running.keys:
            self._start(job)
        self._fill()
        while (ended := self._next())[0] != job:
            self._ended.append(ended)
            self._fill()
        return ended[1]

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
        if not (self._covering.changes_layout(cell) and self._allowed(cell)):
            return False
        return any(str(fault) == known for fault in faults.shown(self._cells.configured(cell)))

    def _fails_alike(self, cell: Configuration, trial: AuditRun) -> bool:
        if not (self._covering.changes_layout(cell) and self._allowed(cell)):
            return False
        smaller = self._audited(cell)
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
        small = self._cells.composed([*sizes, *self._cells.words(cell)])
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
            refused=self._cells.refused,
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
    with (locked if resume else locked_empty)(where):
        _write_texts(where.texts)
        try:
            return Campaign(where, state, on_trial, scripts=scripts).run(exitfirst=exitfirst)
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted(f"stopped after {len(state.trials)} audits; tpi audit --resume {where.path}") from None
        except ConfigError:
            if not state.trials:  # the model or an override is refused; nothing was done
                shutil.rmtree(where.path)
            raise
        finally:
            for kept in where.path.glob(f"trials/*/{workflow.REFERENCE}"):
                shutil.rmtree(kept, ignore_errors=True)


def _write_texts(folder: Path) -> None:
    """Write many documents of a letter, then a long one: their ends, which are masked, lie unevenly."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [length for _ in range(200) for length in (*[1] * draw.randint(4, 12), draw.randint(20, 40))]
    letters = [[chr(draw.randint(97, 122)) for _ in range(length)] for length in lengths]
    text = "\n".join(json.dumps({"text": "".join(document)}) for document in letters)
    (folder / "texts.jsonl").write_text(text + "\n")
