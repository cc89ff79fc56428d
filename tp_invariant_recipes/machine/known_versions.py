"""Sets of Megatron-Bridge, Megatron-Core and Transformer Engine that are known to work together: one row a set.

`tpi doctor` shows them. `scripts/try-versions` tries another set; a row needs what its `evidence` says to have passed.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownSet:
    """versions: distribution -> version. evidence: the tests that passed with them, and on what."""

    versions: dict[str, str]
    evidence: str


# The last one is that of the locks.
KNOWN = (
    KnownSet(
        {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2", "transformer-engine": "2.20.2"},
        "make test on x86-64 CPUs, without Transformer Engine; tests/gpu on up to four H200s",
    ),
)


def matching(installed: Callable[[str], str | None]) -> KnownSet | None:
    """Return the set that is installed here; None: none is. What is not installed at all does not count against a set.

    installed: the version of a distribution; None: it is not there.
    """
    here = {name: version for name in KNOWN[-1].versions if (version := installed(name)) is not None}
    plain = {name: version.split("+")[0] for name, version in here.items()}
    return next((row for row in KNOWN if plain and plain.items() <= row.versions.items()), None)
