"""How fast this host runs Python: readers of a benchmark that the host limits can place their own host beside it."""

import time

ADDITIONS = 1_000_000
ROUNDS = 3

# At a module's level, where names are looked up in dicts, as they mostly are in the code that launches kernels.
_LOOP = compile(f"s = 0\nfor i in range({ADDITIONS}): s += i", "python_speed", "exec")


def milliseconds() -> float:
    """Of a loop of a million additions at a module's level: the fastest of three."""
    return min(_timed() for _ in range(ROUNDS)) * 1e3


def _timed() -> float:
    start = time.perf_counter()
    exec(_LOOP, {})
    return time.perf_counter() - start
