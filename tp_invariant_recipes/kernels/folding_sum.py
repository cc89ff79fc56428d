"""A sum over a dimension made of elementwise additions: a library's reduction may choose its order by other sizes."""

from torch import Tensor


def folding_sum(values: Tensor, dim: int) -> Tensor:
    """Add dimension `dim` of `values`, and overwrite them: the upper half is added to the lower until one is left.

    values:  […, n, …] fp32; of an odd n the middle one waits.
    returns: […, …], a view; the order of the additions depends on n alone, the launches are log2(n).
    """
    n = values.shape[dim]
    while n > 1:
        half = (n + 1) // 2
        values, upper = values.chunk(2, dim)
        (values if n % 2 == 0 else values.narrow(dim, 0, n - half)).add_(upper)
        n = half
    return values.select(dim, 0)
