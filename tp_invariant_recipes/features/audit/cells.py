"""The settings that a campaign combines, and the configuration of a cell of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import given, parse_all
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.audit import options, workflow
from tp_invariant_recipes.features.audit.pairwise import Cell
from tp_invariant_recipes.settings.run_config import RunConfig

Sections = dict[str, Any]


class Cells:
    """The cells of a model. ConfigError: it is refused as it is.

    overrides: that every run gets. texts: the folder that stands for options.TEXTS.
    base:      the model in the sizes that are tried. sizes: the overrides that cut it.
    axes:      settings that the model may have in some layout, a row an axis; those that change it not at all are left
               out. refused: the others, with the reason.
    """

    def __init__(self, model: str, overrides: Sequence[str], texts: Path, device: str) -> None:
        self._model, self._overrides, self._texts, self._device = model, overrides, texts, device
        self._changes: dict[str, Sections] = {}
        self.refused: dict[str, str] = {}
        self.base, self.sizes = self._cut()
        named = {**options.LAYOUTS, **options.OPTIONS}
        examples = "dataset_root" in self.base.section("dataset")
        absent = {*(() if self.base.shape.experts else options.OF_EXPERTS), *(() if examples else options.OF_EXAMPLES)}
        self.axes = [[] if name in absent else self._possible(name, axis) for name, axis in named.items()]
        self._order = [setting for axis in self.axes for setting in axis]

    def settings(self, cell: Cell) -> tuple[str, ...]:
        """Return the settings of a cell, in the order of the axes."""
        return tuple(setting for setting in self._order if setting in cell)

    def words(self, cell: Cell) -> list[str]:
        """Return the overrides of a cell, in the order of the axes."""
        return [word for setting in self.settings(cell) for word in self._split(setting)]

    def configured(self, cell: Cell) -> RunConfig:
        """Return the configuration of a cell, of what each of its settings changes: Hydra takes half a second."""
        config = self.base
        for setting in self.settings(cell):
            for section, fields in self._changes[setting].items():
                merged = config.section(section) | fields if isinstance(fields, dict) else fields
                config = RunConfig({**config.sections, section: merged})
        return config

    def composed(self, settings: Sequence[str]) -> RunConfig:
        """Compose the model with these overrides. Raises ConfigError."""
        overrides = ["iters=1", *workflow.DEFAULTS, "save=0"]
        numerics = workflow.default_numerics(parse_all(self._overrides))
        words = [*overrides, *numerics, *self._overrides, *settings]
        return compose(self._model, words, device=self._device, also=input_problems).config

    def _cut(self) -> tuple[RunConfig, list[str]]:
        typed = parse_all(self._overrides)
        fields = {override.path for override in typed}
        batches = [[text for text in batch if parse_all([text])[0].path not in fields] for batch in options.BATCHES]
        words = [*workflow.default_numerics(typed), *self._overrides]
        whole = compose(self._model, words, device=self._device)
        sizes = options.sizes(whole.config.model, {path for path in fields if path})
        for cut in (*([*sizes, *batch] for batch in batches), *batches):
            try:
                return self.composed([*cut]), cut
            except ConfigError as error:
                problem = error
        raise problem

    def _typed(self, path: str) -> bool:
        return given(parse_all(self._overrides), path) is not None

    def _split(self, setting: str) -> list[str]:
        words = [word.replace(options.TEXTS, str(self._texts)) for word in setting.split()]
        return [word for word in words if not (word.startswith("seq=") and self._typed("model.seq_length"))]

    def _possible(self, name: str, axis: Sequence[str]) -> list[str]:
        usable, before = [], {"": self.base}
        refused: dict[str, str] = {}
        for setting in axis:
            words = self._split(setting)
            if any(self._typed(override.path) for override in parse_all(words) if override.path):
                continue
            for layout in ("", "tp=2", "dp=2"):
                sizes = [*self.sizes, *layout.split()]
                try:
                    before[layout] = before.get(layout) or self.composed(sizes)
                    config = self.composed([*sizes, *words])
                except ConfigError as error:
                    refused.setdefault(setting, error.problems[0])
                    continue
                refused.pop(setting, None)
                if changes := _changes(before[layout], config):
                    usable.append(setting)
                    self._changes[setting] = changes
                break
            if usable and name in options.FIRST_ALLOWED:
                return usable
        self.refused |= refused
        return usable


def _changes(before: RunConfig, after: RunConfig) -> Sections:
    """Return the fields of each section that differ, or a whole section that has none."""
    changes = {}
    for name, fields in after.sections.items():
        earlier = before.sections.get(name)
        if isinstance(fields, dict):
            known = earlier if isinstance(earlier, dict) else {}
            fields = {key: value for key, value in fields.items() if known.get(key, ...) != value}
            differs = bool(fields)
        else:
            differs = fields != earlier
        if differs:
            changes[name] = fields
    return changes
