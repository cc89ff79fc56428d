# SPDX-License-Identifier: Apache-2.0
"""Loops of this package on the processors of a CPU rank. The number of threads changes no bit of them.

Libraries are held to one thread (settings/environment.py), since it decides how they cut their sums. Threads of Python
and not numba's own: those do not survive the fork that starts a CPU rank.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch


def threads() -> int:
    """Return a rank's share of the processors, or as many as torch has."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(torch.get_num_threads(), len(os.sched_getaffinity(0)) // ranks)


def by_parts(loop: Callable[[int, int], object], count: int, *, pays: bool) -> None:
    """Call loop(first, last) for parts of range(count), side by side if that `pays`. It has to release the GIL."""
    parts = min(threads(), count) if pays else 1
    if parts <= 1:
        loop(0, count)
        return
    borders = [*pairwise(count * part // parts for part in range(parts + 1))]
    others = [_pool(os.getpid()).submit(loop, *ends) for ends in borders[1:]]
    loop(*borders[0])
    for done in others:
        done.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """process: whose threads they are; a forked process has none of its parent's."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)))
