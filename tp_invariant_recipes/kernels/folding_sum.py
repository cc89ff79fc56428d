"""A sum over one dimension by elementwise additions. A library's reduction may choose its order by other sizes."""

from torch import Tensor


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
