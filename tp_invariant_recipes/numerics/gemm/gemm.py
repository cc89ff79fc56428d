# SPDX-License-Identifier: Apache-2.0
"""Matrix GEMMs of numerics=tree.

On a GPU a GEMM walks k in order (numerics/gemm/defined.py): a row's and a column's bits do not depend on how
many lie beside it, so all shards of a rank share a launch. On a CPU no library walks k in order. There every shard is a
GEMM of its own by definition, on shapes that no t changes (numerics/gemm/cpu.py).
"""

from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.gemm.fixed_tile_gemm import TILES, fixed_tile_gemm
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.gemm import cpu, defined, sampling
from tp_invariant_recipes.numerics.gemm.operands import Split

LARGE = 2.0**40
PLACES = 4  # of k in a tile, each in a step of its own of a tensor core; two tiles


@cache
def require_order(device: str) -> None:
    """Compute both kinds of tiles, once a process and device. Raises RunError: k is walked in another order."""
    for dtype, tile in TILES.items():
        step = tile["TILE_K"] // PLACES
        chosen = torch.tensor(list(permutations(range(2 * PLACES), 3)), device=device)
        values = torch.tensor((LARGE, -LARGE, 1.0), device=device).expand(chosen.shape)
        a = torch.zeros(len(chosen), 2 * PLACES * step, device=device).scatter_(1, chosen * step, values).to(dtype)
        sums = fixed_tile_gemm(a, a.new_ones(a.shape[1], 16), torch.empty(len(a), 16, device=device))
        if (sums != (chosen[:, 2:] == chosen.amax(1, keepdim=True))).any():
            raise RunError(
                f"numerics=tree: fixed tiles of {dtype} do not add in the order of k on {device}, as compiled "
                f"by Triton {installed('triton')}; install the version of the lock file"
            )


def gemm(a: Tensor, b: Tensor, out: Tensor, *, rows: Split = 1, columns: Split = 1, add: bool = False) -> Tensor:
    """out = a @ b, or out += a @ b: fp32 accumulation, rounded once to out's dtype; what is added to is fp32.

    a:             [m, k] bf16 or fp32; b: [k, n], of a's dtype; either may be a slice or transposed.
    out:           [m, n] of a's dtype or fp32; may be a slice of rows or columns.
    rows, columns: on a CPU the shards that m or n consists of, each a GEMM of its own by definition; not both. On a
                   GPU they change nothing.
    returns:       out.
    raises TypeError: on a GPU, operands of other dtypes.
    """
    if a.is_cuda:
        return defined.compute(a, b, out, add)
    taking = sampling.begin_library(a, b, out, rows, columns, add)
    if add:
        cpu.gemm(a, b, rows, columns, out)
    else:
        out.copy_(cpu.gemm(a, b, rows, columns))
    for started in taking:
        started.end()
    return out
