"""Limits of the invariant numerics: a rule that is broken is beyond what they cover, and numerics=stock avoids it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.fields.field import as_text
from tp_invariant_recipes.settings import cuda_graphs
from tp_invariant_recipes.settings.run_config import RunConfig

Test = Callable[[RunConfig], Any]


def limit(test: Test, text: str = "", solve: str = "") -> Rule[RunConfig]:
    """Return a limit of every run with invariant numerics."""
    return limit_of(lambda t: True, test, text, solve)


def limit_of(needs: Test, test: Test, text: str, solve: str = "") -> Rule[RunConfig]:
    """Return a limit of those runs to which something applies."""
    return Rule(
        test,
        text,
        solve,
        needs=lambda t: t.numerics.invariant and needs(t),
        head=lambda t: f"numerics={t.numerics.mode}",
        stock=True,
    )


def naming(path: str, rule: Rule[RunConfig]) -> Rule[RunConfig]:
    """Return a limit of the values of one field whose problem begins with the field and its value."""

    def head(config: RunConfig) -> str:
        value: Any = config.sections
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return f"numerics={config.numerics.mode}: {path}={value if isinstance(value, str) else as_text(value)}"

    return replace(rule, head=head)


def lacks(feature: str) -> Test:
    """Whether a run's mode has no invariant version of one of the features of numerics/mode.py."""
    return lambda t: not t.numerics.covers(feature)


def cuts_sequences(config: RunConfig) -> bool:
    """Whether sequences are cut, on one rank or several."""
    return config.layout.cp > 1 or (config.numerics.context_shards or 1) > 1


def has(field: str) -> Test:
    """Whether a field of the model is set to anything."""
    return lambda t: t.model.get(field)


def name_of(value: Any) -> str:
    """Return the last part of the name of a function or an enumeration: text in a tree, the object elsewhere."""
    text = value if isinstance(value, str) else getattr(value, "__name__", getattr(value, "name", ""))
    return str(text).rpartition(".")[2]


def uncut(what: str) -> tuple[Test, str, str]:
    """Of what takes whole sequences. what: with its verb, such as "LoRA has"."""
    return cuts_sequences, f"{what} no version with context shards", "cp=1, and leave numerics.context_shards out"


def uncaptured(what: str, instead: str = "") -> tuple[Test, str, str]:
    """Of what no CUDA graph holds. what: with its verb, such as "adapters have". instead: another key, or none."""
    text = f"{what} not been captured in CUDA graphs"
    return lambda t: cuda_graphs.requested(t.model), text, f"cuda_graph=off{instead}"


def unsplit(what: str) -> tuple[Test, str, str]:
    """Of what takes part in tensor parallelism with sequence parallelism alone. what: with its verb."""

    def split(config: RunConfig) -> bool:
        return config.layout.tp > 1 and not config.layout.sp

    return split, f"{what} sequence parallelism", "sp=true"
