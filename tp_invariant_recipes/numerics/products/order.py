"""Whether fixed tiles walk k in order on the GPU at hand: Triton compiles them, and another version could reorder k.

A row holds LARGE, -LARGE and 1 at three places of k, and the other operand is ones. The 1 is lost while LARGE is in the
accumulator, so the sum is 1 if the 1 comes last, and else 0: all rows together tell the order of the places.
"""

from functools import cache
from itertools import permutations

import torch

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.kernels.products.fixed_tile_product import TILES, fixed_tile_product
from tp_invariant_recipes.machine.versions import installed

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
        sums = fixed_tile_product(a, a.new_ones(a.shape[1], 16), torch.empty(len(a), 16, device=device))
        if (sums != (chosen[:, 2:] == chosen.amax(1, keepdim=True))).any():
            raise RunError(
                f"numerics=tree: fixed tiles of {dtype} do not add products in the order of k on {device}, as compiled "
                f"by Triton {installed('triton')}; install the version of the lock file"
            )
