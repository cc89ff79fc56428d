"""Products of matrices as kernels/tensor_core_sum.py defines them, by whatever computes that sum on a device.

Rows and columns of such a product do not depend on how many lie beside them, so shards may share a call. The virtual
shards decide the order of sums across them only: those are IEEE additions in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.shard_operands import Parts


@dataclass(frozen=True)
class Way:
    """A kernel or library that computes the defined product of bf16 operands.

    device:   what torch calls its device.
    compute:  [m, k] and [k, n] → [m, n] fp32.
    offered:  whether runs may use it.
    evidence: why it is believed to compute the defined sum, and where it is known not to.
    """

    name: str
    device: str
    compute: Callable[[Tensor, Tensor], Tensor]
    offered: bool
    evidence: str


def _by_numba(a: Tensor, b: Tensor) -> Tensor:
    from tp_invariant_recipes.kernels import tensor_core_cpu  # loads numba

    return tensor_core_cpu.product(a, b)


def _by_fixed_tiles(a: Tensor, b: Tensor) -> Tensor:
    from tp_invariant_recipes.kernels.fixed_tile_product import fixed_tile_product

    return fixed_tile_product(a, b, torch.empty(a.shape[0], b.shape[1], device=a.device))


def _by_grouped_tiles(a: Tensor, b: Tensor) -> Tensor:
    from tp_invariant_recipes.kernels.grouped_product import Groups, grouped_product

    rows = Groups((len(a),), torch.tensor([len(a)], device=a.device))
    out = torch.empty(a.shape[0], b.shape[1], device=a.device)
    grouped_product(a.contiguous(), [b.contiguous()], out, rows, transposed=False)
    return out


def _by_cublas(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


# The product itself is stated in kernels/tensor_core_sum.py, and nowhere else.
WAYS = (
    Way(
        "numba",
        "cpu",
        _by_numba,
        True,
        "all bits of the 40 recorded bf16 cases; the first rows of 39 of them before every run",
    ),
    Way(
        "fixed tiles",
        "cuda",
        _by_fixed_tiles,
        True,
        "all bits of the 40 recorded bf16 cases on an H200; `tpi conformance` repeats it on any GPU",
    ),
    Way(
        "grouped tiles",
        "cuda",
        _by_grouped_tiles,
        False,
        "the same tile and order of k as fixed tiles; nothing has compared it with the recorded cases yet",
    ),
    Way(
        "cuBLAS",
        "cuda",
        _by_cublas,
        False,
        "42 shapes of Qwen3-8B on an H200, all bits of fixed tiles; other bits where it splits k (64 × 32768 × 64), so "
        "only where a probe with operands that cancel agrees with fixed tiles",
    ),
)


def way(device: str) -> Way:
    """The offered way of a device. Raises ConfigError: there is none."""
    for one in WAYS:
        if one.device == device and one.offered:
            return one
    raise ConfigError(f"numerics=portable: products on {device} are not offered yet; device=cpu")


def product(a: Tensor, b: Tensor, out: Tensor, *, rows: Parts = 1, columns: Parts = 1, add: bool = False) -> Tensor:
    """out = a @ b, rounded once to out's dtype; or out += a @ b, an addition in fp32, rounded once.

    a:             [m, k]; b: [k, n], both bf16, with any strides.
    out:           [m, n] bf16 or fp32, with any strides.
    rows, columns: shards of m or n, which change nothing: a row's and a column's result is its own.
    returns:       out.
    raises TypeError: other dtypes; ConfigError: a device without an offered way.
    """
    _check(a, b)
    total = way(a.device.type).compute(a, b)
    if add:
        total = total.add_(out)
    return out.copy_(total)


def partials(a: Tensor, b: Tensor, shards: int, segments: tuple[int, ...]) -> Tensor:
    """a @ b for each shard of the dimension that is summed.

    a, b:     [m, k] and [k, n] bf16; k consists of segments, each of `shards` shards.
    segments: the size of each in k.
    returns:  [shards, m, n] fp32: the sum over segments, in order, of the segment's product.
    """
    _check(a, b)
    compute = way(a.device.type).compute
    total = torch.empty(shards, a.shape[0], b.shape[1], device=a.device)
    for segment, (x, y) in enumerate(zip(a.split(segments, 1), b.split(segments), strict=True)):
        parts = zip(total, x.chunk(shards, 1), y.chunk(shards), strict=True)
        for part, left, right in parts:
            part.add_(compute(left, right)) if segment else part.copy_(compute(left, right))
    return total


def _check(a: Tensor, b: Tensor) -> None:
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise TypeError(f"numerics=portable multiplies bf16 numbers, not {a.dtype} and {b.dtype}")
