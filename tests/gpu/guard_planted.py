# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.guard_planted ARGUMENTS`: `tpi ARGUMENTS` on a GPU one tile of whose products has a wrong bit.

Ranks are forked from this process and inherit the fault (start/forking.py).
"""

import sys
from typing import Any

import torch

TILE = 128


def plant() -> None:
    """The lowest bit of every output of the first tile of each product, at every launch; graphs capture it."""
    from tp_invariant_recipes.numerics.gemm import defined

    choose = defined.chosen

    def chosen(a: Any, b: Any, out: Any, add: bool) -> Any:
        way = choose(a, b, out, add)

        def compute(a: Any, b: Any, out: Any, add: bool) -> None:
            way(a, b, out, add)
            word = {2: torch.int16, 4: torch.int32}[out.element_size()]
            out[:TILE, :TILE].view(word).bitwise_xor_(1)

        return compute

    defined.chosen = chosen


if __name__ == "__main__":
    plant()
    from tp_invariant_recipes.cli.main import main

    sys.argv = ["tpi", *sys.argv[1:]]
    main()
