"""Sums whose order depends on the number of terms alone. A library's reduction may choose its order by other sizes."""

from torch import Tensor

LEAVES = 64  # at most, of a shard: enough programs to fill a GPU when a rank has one or two shards


def leaves_of(rows: int, least: int = 1) -> int:
    """How many equal leaves the rows of a shard are cut into: the largest power of two that leaves `least` in each."""
    leaves = 1
    while leaves < LEAVES and rows % (2 * leaves) == 0 and rows // (2 * leaves) >= least:
        leaves *= 2
    return leaves


def folding_sum(values: Tensor, dim: int) -> Tensor:
    """Sum `values` over dimension `dim`, overwriting them: add the upper half to the lower half until one is left.

    values:  […, n, …] fp32; for odd n the middle element waits for the next round.
    returns: […, …], a view. The order of the additions depends only on n. There are log2(n) launches.
    """
    n = values.shape[dim]
    while n > 1:
        half = (n + 1) // 2
        values, upper = values.chunk(2, dim)
        (values if n % 2 == 0 else values.narrow(dim, 0, n - half)).add_(upper)
        n = half
    return values.select(dim, 0)
