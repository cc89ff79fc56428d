# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.shadow_planted KERNEL once|always FOLDER < RUNS`: side_by_side.py, with a fault on rank 1 of all
runs: one bit of what a kernel gives, at its first launch of step 2 or at every launch from there on.

Ranks are forked and inherit it.
"""

import sys

from tests.distributed.guard_faults import Planted
from tests.gpu import side_by_side


def main() -> None:
    """See the top."""
    kernel, when, folder = sys.argv[1:]
    forked = side_by_side._ranks_are_forked

    def planted() -> None:
        forked()
        Planted(kernel, always=when == "always").plant()

    side_by_side._ranks_are_forked = planted
    sys.argv = [sys.argv[0], folder]
    side_by_side.main()


if __name__ == "__main__":
    main()
