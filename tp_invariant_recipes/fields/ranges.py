"""What finite numbers may be.

A number whose field has no range must be at least 0. So a slip of the keyboard is refused by its name, before a rule
divides by it, counts up to it, or Megatron takes it as "off".
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """What a finite number may be. words: what follows "KEY=VALUE: must be"."""

    words: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("at least 0", lambda n: n >= 0)
COUNT = Range("at least 1", lambda n: n >= 1)
POSITIVE = Range("above 0", lambda n: n > 0)
SHARE = Range("from 0 to 1", lambda n: 0 <= n <= 1)
BELOW_1 = Range("at least 0 and below 1", lambda n: 0 <= n < 1)
PART = Range("above 0 and at most 1", lambda n: 0 < n <= 1)
# -1 stands for "none" or "all", the number may well be negative, or it has a rule of its own.
SIGNED = Range("a finite number", lambda n: True)
# numpy takes seeds below 2**32, and Megatron adds 100 for each pipeline stage.
SEED = Range(f"from 1 to {2**32 - 2**24}", lambda n: 1 <= n <= 2**32 - 2**24)
NICE = Range("from -20 to 19", lambda n: -20 <= n <= 19)  # of a process, as in setpriority(2)
PORT = Range("from 1 to 65535", lambda n: 1 <= n <= 65535)
