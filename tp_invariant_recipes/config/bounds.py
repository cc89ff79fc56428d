"""The largest counts of a run, one row a key. Beyond them a loop or a table of Megatron's never ends.

The bounds stop slips of the keyboard, not large runs: each leaves far more room than any run that we know of needs.
"""

from collections.abc import Iterator
from typing import Any

from tp_invariant_recipes.config.keys import SHORT_KEYS

Tree = dict[str, Any]

LARGEST = 2**31 - 1  # what a 32-bit integer holds

_DEGREE = 2**16  # ranks along one dimension
SHORT = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp"), _DEGREE),
    **dict.fromkeys(("mbs", "gbs"), 2**24),
    "seq": 2**27,
    "iters": LARGEST,
    "save": LARGEST,
}
LIMITS = {SHORT_KEYS[name].path: (name, limit) for name, limit in SHORT.items()}
# The other whole numbers, by section: libraries keep sizes of a model in 32 bits, anything else in 64.
SECTIONS = {"model": LARGEST}
WIDEST = 2**63 - 1


def wrong(tree: Tree) -> dict[str, str]:
    """Path -> problem, for every whole number that is larger than its bound."""
    found = {}
    for path, value in _integers("", tree):
        name, limit = LIMITS.get(path, (path, SECTIONS.get(path.partition(".")[0], WIDEST)))
        if abs(value) > limit:
            end = f"at most {limit}" if value > 0 else f"at least -{limit}"
            found[path] = f"{name}={value}: must be {end}"
    return found


def _integers(path: str, value: Any) -> Iterator[tuple[str, int]]:
    """Every whole number of a tree and its dotted path; numbers in a list have the path of the list."""
    if type(value) is int:
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _integers(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _integers(path, inner)
