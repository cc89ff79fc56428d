"""Numbers in their ranges, and the largest counts of a run. The catalogue has the ranges of Bridge's fields."""

import math
from collections.abc import Iterator
from typing import Any

from tp_invariant_recipes.fields.catalogue import field_at
from tp_invariant_recipes.fields.ranges import COUNT, NOT_NEGATIVE, SEED, SIGNED, Range
from tp_invariant_recipes.settings.keys import SHORT_KEYS

Tree = dict[str, Any]

# Of our own sections.
OWN_RANGES = {
    COUNT: "cluster.ranks_per_node slurm.save_before slurm.tries slurm.rendezvous_timeout guard.every guard.products",
    SIGNED: "numerics.virtual_shards numerics.data_shards numerics.context_shards numerics.expert_groups "
    "ledger.digests",  # have rules
}
# The short keys are counts, but for these.
SHORT_RANGES = {"sp": SIGNED, "lr": NOT_NEGATIVE, "seed": SEED, "save": NOT_NEGATIVE}

BY_PATH = {path: range_ for range_, paths in OWN_RANGES.items() for path in paths.split()}
BY_PATH |= {key.path: SHORT_RANGES.get(key.name, COUNT) for key in SHORT_KEYS.values() if isinstance(key.type, type)}

# Numbers that may be infinite: a threshold that nothing reaches.
INFINITE = {"optimizer.grad_norm_skip_threshold"}

# The largest counts. Beyond them a loop or a table of Megatron's never ends. They stop slips of the keyboard, not large
# runs: each leaves far more room than any run that we know of needs.
LARGEST = 2**31 - 1  # what a 32-bit integer holds

_DEGREE = 2**16  # ranks along one dimension
SHORT = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp"), _DEGREE),
    **dict.fromkeys(("mbs", "gbs"), 2**24),
    "seq": 2**27,
    "iters": LARGEST,
    "save": LARGEST,
}
LIMITS = {SHORT_KEYS[name].path: limit for name, limit in SHORT.items()}
# The other whole numbers, by section: libraries keep sizes of a model in 32 bits, anything else in 64.
SECTIONS = {"model": LARGEST}
WIDEST = 2**63 - 1

_NAMES = {key.path: key.name for key in SHORT_KEYS.values()}


def wrong(tree: Tree) -> dict[str, str]:
    """Path -> problem, for every number that is none, is outside of its range, or is larger than its bound."""
    problems: dict[str, str] = {}
    for path, value in _numbers("", tree):
        if must := _must(path, value):
            problems.setdefault(path, f"{_NAMES.get(path, path)}={value}: must be {must}")
    return problems


def _must(path: str, value: float) -> str | None:
    """Return what the number at a path must be and is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if value > 0 and path in INFINITE else "a finite number"
    allowed = range_of(path)
    if not allowed.holds(value):
        return allowed.words
    limit = LIMITS.get(path, SECTIONS.get(path.partition(".")[0], WIDEST))
    if isinstance(value, int) and abs(value) > limit:
        return f"at most {limit}" if value > 0 else f"at least -{limit}"
    return None


def range_of(path: str) -> Range:
    """Return what the number at a path may be."""
    field = field_at(path)
    return BY_PATH.get(path) or (field.range if field else NOT_NEGATIVE)


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a tree and its dotted path; numbers in a list have the path of the list."""
    if type(value) in (int, float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(path, inner)
