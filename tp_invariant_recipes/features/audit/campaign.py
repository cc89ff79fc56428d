"""`tpi audit MODEL --all`: audit the layouts and options that a model allows, in cells that cover each pair once."""

import json
import random
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.configuration import check
from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config import reserved
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import given, parse_all, texts
from tp_invariant_recipes.errors import ConfigError, Interrupted, RunError, TpiError, refuse
from tp_invariant_recipes.features.audit import options, script, workflow
from tp_invariant_recipes.features.audit import page as audit_page
from tp_invariant_recipes.features.audit.pairwise import Cell, Covering, shrunk
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.launch.local import Watch
from tp_invariant_recipes.patches import faults
from tp_invariant_recipes.reading import Listed, Record, checked
from tp_invariant_recipes.runs.audit_dir import AuditedRun, CampaignDir
from tp_invariant_recipes.runs.lock import locked, locked_empty
from tp_invariant_recipes.runs.run_dir import choose_for_several
from tp_invariant_recipes.settings.run_config import RunConfig

FAILED = "failed"
RANKS = 4  # at most, of a cell
Sections = dict[str, Any]
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Trial(Record):
    """An audit of a cell.

    settings: in the order of the command. verdict: one of the audit's, or FAILED.
    first:    "KIND MODULE" of the first tensor beyond rounding; None: there is none.
    """

    settings: Listed[str]
    verdict: str
    text: str
    first: str | None
    seconds: float
    known: str | None = None
    size: float | None = None
    reference: float | None = None
    ranks: str | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict == workflow.WITHIN

    def same_fault(self, other: "Trial") -> bool:
        """Whether both have one fault: the same tensor of any layer or expert."""
        names = [_NUMBER.sub("*", trial.first or trial.text.partition("\n")[0]) for trial in (self, other)]
        return self.verdict == other.verdict and names[0] == names[1]


@dataclass(frozen=True)
class ShrunkFault(Record):
    """A fault, shrunk.

    command: the smallest that shows it. option: its settings in one line. module: the first beyond rounding.
    size:    RMS of the module's error, relative to the reference. reference: RMS of the reference's value.
    ranks:   those that are wrong, of all. script: the file of a program that shows it; None: there is none.
    """

    settings: Listed[str]
    verdict: str
    text: str
    command: str
    known: str | None
    option: str
    module: str | None
    size: float | None
    reference: float | None
    ranks: str | None
    script: str | None = None


@dataclass
class State:
    """What `audits.json` holds of a campaign: all that --resume needs."""

    model: str
    overrides: list[str]
    trials: list[Trial] = field(default_factory=list)
    findings: list[ShrunkFault] = field(default_factory=list)


class Campaign:
    """All audits of a model in a directory.

    on_trial: is told of every verdict as it comes. scripts: write a program for each fault that a layer alone has.
    """

    def __init__(
        self, where: CampaignDir, state: State, watch: Watch, on_trial: Callable[[Trial], None], *, scripts: bool
    ) -> None:
        self.where, self.state, self._watch, self._on_trial = where, state, watch, on_trial
        self._scripts = scripts
        self._device = plan.detect_device()
        self._changes: dict[str, Sections] = {}
        self._refused: set[Cell] = set()
        self._references: dict[str, AuditedRun] = {}
        self._base, self._sizes = self._cut()
        named = {**options.LAYOUTS, **options.OPTIONS}
        absent = () if self._base.shape.experts else options.OF_EXPERTS
        axes = [[] if name in absent else self._possible(axis) for name, axis in named.items()]
        self._order = [setting for axis in axes for setting in axis]
        self._covering = Covering(axes, len(options.LAYOUTS), self._allowed, self._ranks_of)

    def run(self, *, exitfirst: bool = False) -> dict[str, Any]:
        """Audit cell after cell; return what `audits.json` holds. Interrupted: Ctrl-C, SIGTERM."""
        begun = time.monotonic()
        while (cell := self._covering.next()) is not None:
            trial = self._audited(cell)
            if trial is None:
                continue
            if trial.sound or trial.verdict == workflow.NOT_DECIDED:
                self._covering.cover(cell)
                continue
            self._record(*self._shrunk(cell, trial))
            if exitfirst:
                break
        return self._write(round(time.monotonic() - begun, 1))

    # --- which cells ---

    def _cut(self) -> tuple[RunConfig, list[str]]:
        """Return the model in the sizes that are tried, and the overrides that cut it."""
        typed = parse_all(self.state.overrides)
        fields = {override.path for override in typed}
        batch = [text for text in options.BATCH if parse_all([text])[0].path not in fields]
        words = [*workflow.default_numerics(typed), *self.state.overrides]
        whole = compose(self.state.model, words, device=self._device)
        sizes = options.sizes(whole.config.model, {path for path in fields if path})
        for cut in ([*sizes, *batch], batch):
            try:
                return self._composed([*cut]), cut
            except ConfigError as error:
                problem = error
        raise problem

    def _composed(self, settings: Sequence[str]) -> RunConfig:
        overrides = ["iters=1", *workflow.DEFAULTS, "save=0"]
        numerics = workflow.default_numerics(parse_all(self.state.overrides))
        words = [*overrides, *numerics, *self.state.overrides, *settings]
        return compose(self.state.model, words, device=self._device, also=input_problems).config

    def _typed(self, path: str) -> bool:
        return given(parse_all(self.state.overrides), path) is not None

    def _words(self, cell: Cell) -> list[str]:
        """Return the overrides of a cell, in the order of the axes."""
        return [word for setting in self._order if setting in cell for word in self._split(setting)]

    def _split(self, setting: str) -> list[str]:
        words = [word.replace(options.TEXTS, str(self.where.texts)) for word in setting.split()]
        return [word for word in words if not (word.startswith("seq=") and self._typed("model.seq_length"))]

    def _possible(self, axis: Sequence[str]) -> list[str]:
        """Return the settings of an axis that the model lacks, and may have in some layout."""
        usable, before = [], {"": self._base}
        for setting in axis:
            words = self._split(setting)
            if any(self._typed(override.path) for override in parse_all(words) if override.path):
                continue
            for layout in ("", "tp=2", "dp=2"):
                sizes = [*self._sizes, *layout.split()]
                try:
                    before[layout] = before.get(layout) or self._composed(sizes)
                    config = self._composed([*sizes, *words])
                except ConfigError:
                    continue
                if changes := _changes(before[layout], config):
                    usable.append(setting)
                    self._changes[setting] = changes
                break
        return usable

    def _ranks_of(self, setting: str) -> int:
        return 2 if setting[:3] in ("tp=", "pp=", "cp=", "dp=") else 1

    def _allowed(self, cell: Cell) -> bool:
        """Whether a run may have these settings, and no fault that is found already is among them."""
        if cell in self._refused or any(set(finding.settings) <= cell for finding in self.state.findings):
            return False
        config = self._configured(cell)
        if config.layout.world > RANKS or check(config):
            return False
        named = {finding.known for finding in self.state.findings}
        return not any(str(fault) in named for fault in faults.known(config))

    def _configured(self, cell: Cell) -> RunConfig:
        """Return the configuration of a cell, of what each of its settings changes: Hydra takes half a second."""
        config = self._base
        for setting in self._order:
            for section, fields in self._changes[setting].items() if setting in cell else ():
                merged = config.section(section) | fields if isinstance(fields, dict) else fields
                config = RunConfig({**config.sections, section: merged})
        return config

    # --- audits ---

    def _audited(self, cell: Cell, sizes: Sequence[str] = ()) -> Trial | None:
        """Return the audit of a cell, which may be recorded from an earlier start; None: no run may have it."""
        settings = (*sizes, *(setting for setting in self._order if setting in cell))
        for trial in self.state.trials:
            if tuple(trial.settings) == settings:
                return trial
        begun = time.monotonic()
        number = len(self.state.trials) + 1
        words = [*self._sizes, *self.state.overrides, *self._words(cell), *sizes]
        where, facts = self.where.trial(number), dict[str, Any](first=None)
        try:
            with redirect_stdout(StringIO()):
                planned = workflow.new(self.state.model, words, directory=where)
                workflow.check(planned)
        except ConfigError:
            self._refused.add(cell)
            return None
        try:
            result = self._executed(planned)
            verdict, text = result["verdict"], result["text"].partition(": ")[2]
            if first := result["first"]:
                facts = {
                    "first": f"{first['kind']} {first['module']}",
                    "known": result["known"],
                    "size": first["size"],
                    "reference": first["rms"],
                    "ranks": f"{', '.join(map(str, first['ranks']))} of {first['of']}",
                }
        except (Interrupted, workflow.StoppedAudit):
            raise Interrupted from None
        except TpiError as error:
            verdict, text = FAILED, str(error).replace("so that nothing can be compared\n", "")
        trial = Trial(settings, verdict, text, seconds=round(time.monotonic() - begun, 1), **facts)
        shutil.rmtree(where / workflow.AUDITED, ignore_errors=True)
        self.state.trials.append(trial)
        self._write()
        self._on_trial(trial)
        return trial

    def _executed(self, planned: workflow.Audit) -> dict[str, Any]:
        """Execute an audit. A reference that an earlier one trained is taken again, if it follows nobody's choices."""
        config = planned.reference.composed.config
        key = json.dumps([config.sections, [*planned.steps]], sort_keys=True, default=str)
        result = workflow.execute(planned, self._watch, keep=True, page=False, reference=self._references.get(key))
        trained = planned.directory.training(workflow.REFERENCE)
        if config.shape.experts:
            shutil.rmtree(trained.path)
        elif trained.path.exists():
            self._references[key] = trained
        return result

    def _shrunk(self, cell: Cell, trial: Trial) -> tuple[Cell, Trial]:
        """Return the smallest cell with a fault. The table says what a known fault needs, and one audit confirms it."""
        if trial.known is not None:
            small = shrunk(cell, partial(self._meets, known=trial.known))
            confirmed = trial if small == cell else self._audited(small)
            if confirmed is not None and confirmed.known == trial.known:
                return small, confirmed
        return shrunk(cell, partial(self._fails_alike, trial=trial)), trial

    def _meets(self, cell: Cell, known: str) -> bool:
        """Whether a known fault strikes a run with these settings."""
        if not (self._covering.changes_layout(cell) and self._allowed(cell)):
            return False
        return any(str(fault) == known for fault in faults.known(self._configured(cell)))

    def _fails_alike(self, cell: Cell, trial: Trial) -> bool:
        if not (self._covering.changes_layout(cell) and self._allowed(cell)):
            return False
        smaller = self._audited(cell)
        if smaller is None:
            return False
        if smaller.sound:
            self._covering.cover(cell)
        return smaller.same_fault(trial)

    def _record(self, cell: Cell, trial: Trial) -> None:
        """Record a fault; cells with all of its settings are not tried again."""
        sizes = self._sizes
        if not any(setting.startswith("pp=") for setting in cell) and self._base.shape.layers == 2:
            less = ["model.num_layers=1"] if not self._base.model.get("moe_layer_freq") else []
            if less and (smaller := self._audited(cell, less)) is not None and smaller.same_fault(trial):
                sizes = [*(size for size in sizes if "num_layers" not in size), *less]
        smallest = next(t for t in reversed(self.state.trials) if t.same_fault(trial))
        command = shlex.join(["tpi", "audit", self.state.model, *self.state.overrides, *sizes, *self._words(cell)])
        settings = tuple(setting for setting in self._order if setting in cell)
        program = self._script(sizes, cell, smallest)
        self.state.findings.append(
            ShrunkFault(
                settings,
                smallest.verdict,
                smallest.text,
                command,
                smallest.known,
                option=" ".join(settings),
                module=smallest.first,
                size=smallest.size,
                reference=smallest.reference,
                ranks=smallest.ranks,
                script=program,
            )
        )
        self._covering.cover(cell)
        self._write()

    def _script(self, sizes: Sequence[str], cell: Cell, trial: Trial) -> str | None:
        """Write the program of a fault, if it is wanted and a layer has the fault; return its path."""
        if not self._scripts or trial.verdict != workflow.BEYOND:
            return None
        small = self._composed([*sizes, *self._words(cell)])
        program = script.text(small, [*cell], trial.first)
        if program is None:
            return None
        file = self.where.path / f"fault-{len(self.state.findings) + 1}.py"
        self.where.write_text(file, program)
        return str(file)

    def _write(self, seconds: float | None = None) -> dict[str, Any]:
        state = self.state
        undecided = any(trial.verdict == workflow.NOT_DECIDED for trial in state.trials)
        beyond = [finding for finding in state.findings if finding.verdict == workflow.BEYOND]
        result = {
            "schema": 1,
            "model": state.model,
            "overrides": state.overrides,
            "sizes": self._sizes,
            "exit_status": 1 if beyond else 2 if state.findings or undecided else 0,
            "directory": str(self.where.path),
            "pairs": self._covering.total,
            "pending": len(self._covering.pending),
            "seconds": seconds,
            "trials": [asdict(trial) for trial in state.trials],
            "findings": [asdict(finding) for finding in state.findings],
        }
        self.where.write(self.where.result, result)
        self.where.write_text(self.where.page, audit_page.campaign(result))
        return result


def new(model: str, overrides: Sequence[str], directory: Path | None) -> tuple[CampaignDir, State]:
    """Return a campaign that begins. ConfigError: an override is wrong."""
    problems, sound = reserved.check("audit", parse_all(overrides))
    refuse(problems)
    return CampaignDir(choose_for_several(directory, f"audits-{model}")), State(model, [*texts(sound)])


def resumed(directory: Path) -> tuple[CampaignDir, State]:
    """Return a campaign that goes on. RunError: this is no directory of one."""
    where = CampaignDir(directory)
    data = where.read_result()
    try:
        trials = checked(list[Trial], data["trials"])
        return where, State(data["model"], data["overrides"], trials)
    except (KeyError, ValueError) as error:
        raise RunError(f"{where.result}: {error}") from error


def execute(
    where: CampaignDir,
    state: State,
    watch: Watch,
    on_trial: Callable[[Trial], None],
    *,
    resume: bool,
    exitfirst: bool = False,
    scripts: bool = False,
) -> dict[str, Any]:
    """Run a campaign to its end, or to the first fault. Interrupted: Ctrl-C; what it has done is kept for --resume."""
    with (locked if resume else locked_empty)(where):
        _write_texts(where.texts)
        try:
            return Campaign(where, state, watch, on_trial, scripts=scripts).run(exitfirst=exitfirst)
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted(f"stopped after {len(state.trials)} audits; tpi audit --resume {where.path}") from None
        except ConfigError:
            if not state.trials:  # the model or an override is refused; nothing was done
                shutil.rmtree(where.path)
            raise
        finally:
            for kept in where.path.glob(f"trials/*/{workflow.REFERENCE}"):
                shutil.rmtree(kept, ignore_errors=True)


def _changes(before: RunConfig, after: RunConfig) -> Sections:
    """Return the fields of each section that differ, or a whole section that has none."""
    changes = {}
    for name, fields in after.sections.items():
        earlier = before.sections.get(name)
        if isinstance(fields, dict):
            earlier = earlier if isinstance(earlier, dict) else {}
            fields = {key: value for key, value in fields.items() if earlier.get(key, ...) != value}
            earlier = {}
        if fields != earlier:
            changes[name] = fields
    return changes


@contextmanager
def quiet(name: str, planned: plan.Plan) -> Iterator[Callable[[], None]]:
    """Show nothing, as a `Watch`: a line a cell is enough."""
    yield lambda: None


def _write_texts(folder: Path) -> None:
    """Write many documents of a letter, then a long one: their ends, which are masked, lie unevenly."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [length for _ in range(200) for length in (*[1] * draw.randint(4, 12), draw.randint(20, 40))]
    letters = [[chr(draw.randint(97, 122)) for _ in range(length)] for length in lengths]
    text = "\n".join(json.dumps({"text": "".join(document)}) for document in letters)
    (folder / "texts.jsonl").write_text(text + "\n")
