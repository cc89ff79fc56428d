"""Groups of parameters by purpose, recognised by the name in the whole model: one row per group."""

import functools
import re
from dataclasses import dataclass

OTHER = "other"


@dataclass(frozen=True)
class Group:
    """name: for tables. pattern: matches part of its parameters' names."""

    name: str
    pattern: re.Pattern[str]


# The first matching row counts. Transformer Engine keeps a norm's weight in the linear layer after it, and Mamba's
# gated norm is in the mixer, so norms come first.
GROUPS = tuple(
    Group(name, re.compile(pattern))
    for name, pattern in (
        ("norms", r"layer_?norm|\b(final_)?norm\b"),
        ("experts", r"\.experts\."),
        ("shared expert", r"\.shared_experts?\."),
        ("router", r"\.router\."),
        ("attention", r"\.(self|cross)_attention\."),
        ("Mamba", r"\.mixer\."),
        ("dense MLP", r"\.mlp\."),
        ("embedding", r"^embedding\."),
        ("output layer", r"^output_layer\."),
    )
)


@functools.cache  # the same names at every step
def parameter_group(name: str) -> str:
    """The group of a parameter, named as in Megatron's distributed checkpoints; "other" if no row matches."""
    return next((group.name for group in GROUPS if group.pattern.search(name)), OTHER)


def groups_in_order(groups: set[str]) -> list[str]:
    """The given groups in the order of the table."""
    return [name for name in (*(group.name for group in GROUPS[1:]), GROUPS[0].name, OTHER) if name in groups]
