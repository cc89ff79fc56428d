"""Sets of Megatron-Bridge, Megatron-Core and Transformer Engine that are known to work together: one row a set.

`scripts/try-versions` tries another set; a row needs what its `evidence` says to have passed.
"""

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
