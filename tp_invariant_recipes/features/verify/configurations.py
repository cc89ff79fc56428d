# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep, composed and planned, and the problems of all of them in one list."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.types import Override as HydrasOverride
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from tp_invariant_recipes.check.hosts.inputs import input_problems
from tp_invariant_recipes.check.invariant.shards import DEFAULT_SHARDS
from tp_invariant_recipes.config.compose import Composed, compose
from tp_invariant_recipes.config.overrides import Override, given, parse, texts
from tp_invariant_recipes.errors import OR_STOCK, ConfigError, refuse
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.launch.plan import Plan, Planning
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.schema import EXPERT_GROUPS, SHARDS, Header, fingerprint_differences
from tp_invariant_recipes.numerics.mode import MEGATRONS
from tp_invariant_recipes.runs.sweep_dir import Axis, Configuration, Omission, SweepDir
from tp_invariant_recipes.settings import conf_files, expert_groups
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sizing import available_memory
from tp_invariant_recipes.text import abbreviated

MOST = 100  # configurations; more are most likely a typing error, and each costs a training

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_NAME = 100  # characters of a directory's name


@dataclass(frozen=True)
class Choice:
    """One value of every axis.

    name:      of its run directory, such as "tp2-sp-false"; label: for people, such as "tp=2 sp=false".
    values:    one per axis.
    overrides: all overrides of its run; no key has several values.
    """

    name: str
    label: str
    values: tuple[str, ...]
    overrides: tuple[Override, ...]


def spread(overrides: Sequence[Override], problems: list[str]) -> tuple[tuple[Axis, ...], tuple[Choice, ...]]:
    """Return the keys with several values, and every combination: the last key changes fastest.

    An override with wrong values is left out, and `problems` says why; all else is left for `compose`.
    """
    places: dict[int, Axis] = {}
    kept: list[Override | None] = list(overrides)
    for place, override in enumerate(overrides):
        if override.several is None:
            continue
        try:
            values = _values(override.several)
        except ValueError as error:
            problems.append(f"{override.text}: {error}")
            kept[place] = None
        else:
            places[place] = Axis(override.key, values)
    # The later value of a key would win, and configurations with different names would be equal.
    fields = [override.field for override in overrides]
    twice = [place for place in places if fields.count(fields[place]) > 1]
    problems += [f"{overrides[place].key} has several values and is given twice" for place in twice]
    combinations = list(islice(product(*(axis.values for axis in places.values())), MOST + 1))
    if len(combinations) > MOST:
        problems.append(
            f"{' '.join(overrides[place].text for place in places)}: more than {MOST} configurations; give fewer values"
        )
        return tuple(places.values()), ()
    return tuple(places.values()), tuple(_choices(kept, places, combinations))


def _values(parsed: HydrasOverride) -> tuple[str, ...]:
    """Return the values of an override. ValueError: it is not a list of values, is empty, or repeats a value."""
    if parsed.value_type is ValueType.GLOB_CHOICE_SWEEP:
        value: Any = parsed.value()
        values = value.filter(list(conf_files.groups().get(parsed.key_or_group, ())))
    else:
        try:
            values = list(islice(parsed.sweep_string_iterator(), MOST + 1))
        except (HydraException, ValueError) as error:
            raise ValueError(f"{error}; list the values, as in {parsed.key_or_group}=1,2,4") from None
    values = [value.lower() if value in ("True", "False") else value for value in values]
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    if not values:
        raise ValueError("gives no value")
    return tuple(values)


def _choices(
    overrides: Sequence[Override | None], places: dict[int, Axis], combinations: Iterable[tuple[str, ...]]
) -> Iterable[Choice]:
    names: set[str] = set()
    for values in combinations:
        pairs = [(axis.key, value) for axis, value in zip(places.values(), values, strict=True)]
        chosen = dict(zip(places, values, strict=True))
        single = [
            override.with_value(chosen[n]) if override and n in chosen else override
            for n, override in enumerate(overrides)
        ]
        name = "-".join(_word(key, value) for key, value in pairs)[:_LONGEST_NAME]
        name = next(
            candidate for candidate in (name, *(f"{name}-{n}" for n in range(2, MOST + 2))) if candidate not in names
        )
        names.add(name)
        label = " ".join(f"{key}={value}" for key, value in pairs)
        yield Choice(name, label, values, tuple(override for override in single if override))


def _word(key: str, value: str) -> str:
    """Part of a name: tp=2 gives tp2, sp=false sp-false, model.attention_backend=unfused attention_backend-unfused."""
    last = key.rpartition(".")[2]
    return _NOT_IN_NAMES.sub("_", f"{last}{value}" if value.isdigit() else f"{last}-{value}")


class Problems:
    """Problems of configurations, each once. A problem of only some configurations lists these configurations."""

    def __init__(self) -> None:
        self.labels: dict[str, list[str]] = {}
        self.cells = 0

    @contextmanager
    def recording(self, label: str) -> Iterator[None]:
        """Record the problems of a ConfigError of the block, for the configuration with this label."""
        self.cells += 1
        try:
            yield
        except ConfigError as error:
            for problem in error.problems:
                self.labels.setdefault(problem, []).append(label)

    def why(self, label: str) -> str:
        """Return the problems of one configuration."""
        return "; ".join(problem for problem, labels in self.labels.items() if label in labels and problem != OR_STOCK)

    def lines(self) -> list[str]:
        """One line per problem."""
        return [
            problem if len(labels) == self.cells or problem == OR_STOCK else f"{'; '.join(labels)}: {problem}"
            for problem, labels in self.labels.items()
        ]

    def raise_any(self) -> None:
        """Raise ConfigError if there is a problem."""
        refuse(self.lines())


def compose_configurations(
    model: str, axes: Sequence[Axis], choices: Sequence[Choice], problems: list[str], here: bool
) -> tuple[dict[str, Composed], tuple[Omission, ...]]:
    """Compose each configuration, by its label; impossible combinations are left out. here: as in `Plan`.

    ConfigError: `problems`, and those of all configurations where a value fits no combination, which is a mistake.
    """
    composed, cell_problems = compose_each(model, choices, here)
    remaining = [choice.values for choice in choices if choice.label in composed]
    if (
        not problems
        and remaining
        and all(set(axis.values) == {values[n] for values in remaining} for n, axis in enumerate(axes))
    ):
        labels = [choice.label for choice in choices if choice.label not in composed]
        return composed, tuple(Omission(label, cell_problems.why(label)) for label in labels)
    refuse([*problems, *cell_problems.lines()])
    return composed, ()


def compose_each(model: str, choices: Sequence[Choice], here: bool) -> tuple[dict[str, Composed], Problems]:
    """Return the configurations that compose, by label, and the problems of the others."""
    device = plan.detect_device()
    composed, cell_problems, files = {}, Problems(), partial(input_problems, here=here)
    for choice in choices:
        with cell_problems.recording(choice.label):
            composed[choice.label] = compose(model, choice.overrides, device=device, also=files)
    return composed, cell_problems


def with_enough_shards(choices: Sequence[Choice], reference: Ledger | None) -> tuple[Choice, ...]:
    """Return the choices with the reference's V, else one for the largest tp * cp. A given V stays."""
    key = "numerics.virtual_shards"
    wanted = reference.header.numerics.get("virtual_shards") if reference else None
    if wanted is None:
        wanted = max((_degree(choice, "tp") * _degree(choice, "cp") for choice in choices), default=1)
        if wanted <= DEFAULT_SHARDS or wanted & (wanted - 1):
            return tuple(choices)
    return tuple(
        choice
        if given(choice.overrides, key) or _is_stock(choice)
        else replace(choice, overrides=(*choice.overrides, parse(f"{key}={wanted}")))
        for choice in choices
    )


def _degree(choice: Choice, key: str) -> int:
    """Return a degree of parallelism as typed; 1 where it is not, or is no number."""
    typed = given(choice.overrides, SHORT_KEYS[key].path)
    return int(typed.value) if typed and typed.value.isdecimal() else 1


def _is_stock(choice: Choice) -> bool:
    typed = given(choice.overrides, "numerics.mode")
    return typed is not None and typed.value in MEGATRONS


def with_equal_shards(
    choices: Sequence[Choice], composed: dict[str, Composed], reference: Ledger | None
) -> tuple[Choice, ...]:
    """Return the choices with the shards in which configurations would differ: the reference's, else the largest.

    Expert groups suit every configuration. Shards that the user gives stay. Megatron's own numerics have none.
    """
    configs = {label: cell.config for label, cell in composed.items()}
    for key in SHARDS:
        shards = _shards(choices, configs, key)
        wanted = reference.header.identity.get(key) if reference else None
        wanted = wanted or max(filter(None, shards.values()), default=None)
        choices = [
            choice
            if shards[choice.label] in (None, wanted) or given(choice.overrides, key)
            else replace(choice, overrides=(*choice.overrides, parse(f"{key}={wanted}")))
            for choice in choices
        ]
        name = key.partition(".")[2]
        configs = {
            label: config.with_fields("numerics", **{name: wanted}) if shards[label] is not None else config
            for label, config in configs.items()
        }
    return tuple(choices)


def _shards(choices: Sequence[Choice], configs: Mapping[str, RunConfig], key: str) -> dict[str, int | None]:
    """Return each configuration's number of shards of a kind, with the D and C that the configurations have by now;
    None: no shards."""
    shards = {label: getattr(config.numerics, key.partition(".")[2]) for label, config in configs.items()}
    if key != EXPERT_GROUPS:
        return shards
    free = [choice.label for choice in choices if shards[choice.label] and not given(choice.overrides, key)]
    return shards | {label: expert_groups.groups_of_run(configs[label]) for label in free}


def named(choice: Choice, composed: Composed) -> Choice:
    """Return the choice with a name: the only configuration, which no key tells from others, has its tp's."""
    tp = composed.config.layout.tp
    return choice if choice.name else replace(choice, name=f"tp{tp}", label=f"tp={tp}")


def fitting_choices(
    choices: Sequence[Choice], composed: dict[str, Composed], here: bool
) -> tuple[tuple[Choice, ...], tuple[Omission, ...]]:
    """Return the configurations whose memory suffices, and those left out. here: as for `room.room`.

    ConfigError: no two of several configurations fit, or the only one does not.
    """
    found = {choice.label: available_memory.problems(composed[choice.label].config, here=here) for choice in choices}
    large = {label: problems[0] for label, problems in found.items() if problems}
    kept = tuple(choice for choice in choices if choice.label not in large)
    if len(kept) < min(2, len(choices)):
        refuse([f"{label}: {problem}" for label, problem in large.items()])
    return kept, tuple(Omission(label, problem.partition(":\n")[0]) for label, problem in large.items())


def plan_configurations(
    choices: Sequence[Choice],
    composed: Sequence[Composed],
    where: SweepDir,
    how: Planning,
) -> dict[str, Plan]:
    """Plan each configuration, by its name. Raises ConfigError with the problems of all; other TpiErrors as
    `plan.resolve`."""
    plans, cell_problems = {}, Problems()
    for choice, composed_cell in zip(choices, composed, strict=True):
        with cell_problems.recording(choice.label):
            plans[choice.name] = plan.resolve(composed_cell, where.cell(choice.name), how)
    cell_problems.raise_any()
    return plans


def configuration_of(choice: Choice, planned: Plan) -> Configuration:
    """Return the configuration as it stands in the sweep."""
    return Configuration(
        name=choice.name,
        label=choice.label,
        overrides=texts(choice.overrides),
        ranks=planned.layout.world,
        steps=planned.steps,
        identity_hash=planned.identity_hash,
        layout=planned.layout.as_dict(),
        numerics=planned.config.section("numerics"),
    )


def identities(axes: Sequence[Axis], choices: Sequence[Choice], plans: dict[str, Plan]) -> list[str]:
    """Return the reasons why configurations are different experiments: the keys whose values alone change the
    identity."""
    first = choices[0]
    problems = []
    for number, axis in enumerate(axes):
        beside = [c for c in choices if [n for n, v in enumerate(c.values) if v != first.values[n]] == [number]]
        fields = dict.fromkeys(key for c in beside for key in _changed(plans[first.name], plans[c.name]))
        if fields:
            problems.append(f"{axis.key}={','.join(axis.values)} makes different runs: {_differ(list(fields))}")
    others = [c for c in choices if not problems and _changed(plans[first.name], plans[c.name])]
    problems += [
        f"{first.label} and {c.label} are different runs: {_differ(_changed(plans[first.name], plans[c.name]))}"
        for c in others
    ]
    return [f"{problem}; their ledgers are not comparable; train each with tpi train" for problem in problems]


def _changed(a: Plan, b: Plan) -> list[str]:
    return [
        difference.field
        for difference in fingerprint_differences(Header(identity=a.identity), Header(identity=b.identity))
    ]


def _differ(fields: list[str]) -> str:
    return f"{abbreviated(fields, 3)} {'differs' if len(fields) == 1 else 'differ'}"
