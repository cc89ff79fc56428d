"""The 2-norm of all gradients, exact and order-free: the same bits for any sharding, bucketing, order or DP layout.

A fp32 number is m · 2^x with an integer m of 24 bits. With X the largest x of all gradients on all ranks,

    a = floor(m · 2^38 · 2^(x - X))        62 bits; exact down to 2^-38 of the largest gradient, cut below
    norm = sqrt(sum of a²) · 2^(X - 38)

and the sum is one of integers. a² is kept in limbs of 31 bits, from the halves a = h · 2^31 + l:

    bit        124        93         62         31          0
                |  limb 3  |  limb 2  |  limb 1  |  limb 0  |
    l · l                             |  high    |  low     |
    2 · h · l              |  high    |  low     |
    h · h       |  high    |  low     |

What is cut off an element depends on that element and X alone. Over n elements it changes the norm by less than
2^-61 · sqrt(n) of it, 2^-41 for n = 2^40. The one rounding is that of the square root to fp32.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_invariant_recipes.errors import ConfigError

CHUNK = 1 << 24  # elements at a time: about ten temporaries of 8 bytes each; a limb would overflow from 2^30 on
LIMB = 31
LIMBS = 5  # four of a chunk's sum, one for its carry
INFINITE = 0x7F800000  # the bits of inf; those of any NaN, without the sign, are larger
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def get_grad_norm_fp32(
    grads_for_norm: list[Tensor] | Tensor,
    norm_type: int | float = 2,
    grad_stats_parallel_group: Any = None,
) -> float:
    """Stand in for the function of this name in megatron.core.optimizer.clip_grads.

    grads_for_norm: what this rank counts; the caller has left out replicas.
    grad_stats_parallel_group: reduced over, after the data-parallel group of DTensors; None is the whole world.
    """
    if float(norm_type) != 2.0:
        raise ConfigError(f"norm_type={norm_type}: only the 2-norm of the gradients is invariant; set norm_type=2")
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else list(grads_for_norm)
    group = dist.group.WORLD if grad_stats_parallel_group is None else grad_stats_parallel_group
    return exact_grad_norm([_local(grad) for grad in grads], [*_groups_of_dtensors(grads), group])


@torch.no_grad()
def exact_grad_norm(grads: Sequence[Tensor], groups: Iterable[Any] = ()) -> float:
    """sqrt(sum of g²) over all elements of all ranks, rounded once to fp32; the same bits on every rank.

    grads:  this rank's gradients of any shape and number, also none, in fp32, bf16 or fp16.
    groups: process groups to sum over, one after the other; none means this rank alone. All ranks must call.
    returns: nan if there is a NaN anywhere, else inf if there is an infinity or the norm is beyond fp32.
    """
    groups = list(groups)
    for grad in grads:
        if grad.dtype not in DTYPES:
            raise TypeError(f"a gradient of {grad.dtype}; the exact norm is for fp32, bf16 and fp16")
    device = _device(grads, groups)
    chunks = [chunk for grad in grads if grad.numel() for chunk in grad.detach().reshape(-1).split(CHUNK)]

    largest = torch.zeros((), dtype=torch.int64, device=device)
    for chunk in chunks:
        largest = torch.maximum(largest, _magnitude(chunk).max().to(device))
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)

    limbs = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    for chunk in chunks:
        limbs += _limbs(chunk, _exponent(largest.to(chunk.device))).to(device)
    for group in groups:
        dist.all_reduce(limbs, op=dist.ReduceOp.SUM, group=group)

    bits, *parts = torch.cat((largest.view(1), limbs)).tolist()
    if bits >= INFINITE:
        return math.nan if bits > INFINITE else math.inf
    total = sum(part << (LIMB * place) for place, part in enumerate(parts))
    return _rounded_root(total, max(bits >> 23, 1) - 150 - 38)


def _magnitude(chunk: Tensor) -> Tensor:
    """The bits of |g| in fp32 as int32: ordered as the numbers are, and no flushing of subnormals can touch them."""
    return chunk.float().view(torch.int32) & 0x7FFFFFFF


def _exponent(bits: Tensor) -> Tensor:
    """The exponent field; subnormals have the same exponent as the smallest normal numbers."""
    return (bits >> 23).clamp_(min=1)


def _limbs(chunk: Tensor, top: Tensor) -> Tensor:
    """The sum of a² over a chunk, in LIMBS limbs of LIMB bits, lowest first."""
    bits = _magnitude(chunk)
    down = (top - _exponent(bits)).clamp_(max=62)
    mantissa = (bits & 0x7FFFFF) | ((bits >> 23) > 0).to(torch.int32).bitwise_left_shift_(23)
    a = mantissa.to(torch.int64).bitwise_left_shift_(38).bitwise_right_shift_(down.to(torch.int64))
    h, l = a >> LIMB, a & _MASK  # noqa: E741
    ll_low, ll_high = _halves(l * l)
    hl_low, hl_high = _halves(l.mul_(h))
    hh_low, hh_high = _halves(h.mul_(h))
    sums = torch.stack((ll_low, ll_high + 2 * hl_low, hh_low + 2 * hl_high, hh_high))
    limbs = sums.new_zeros(LIMBS)
    limbs[:-1] += sums & _MASK
    limbs[1:] += sums >> LIMB
    return limbs


_MASK = (1 << LIMB) - 1


def _halves(product: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the low LIMB bits and the sum of the others."""
    return (product & _MASK).sum(), (product >> LIMB).sum()


def _rounded_root(square: int, exponent: int) -> float:
    """sqrt(square) · 2^exponent, rounded to the nearest fp32, ties to even."""
    if square == 0:
        return 0.0
    more = max(0, 64 - square.bit_length() // 2)  # at least 64 bits of root, and one that says whether there are more
    root = math.isqrt(square << 2 * more)
    root, exponent = root << 1 | (root * root != square << 2 * more), exponent - more - 1
    drop = max(root.bit_length() - 24, -149 - exponent)
    kept, rest, half = root >> drop, root & ((1 << drop) - 1), 1 << (drop - 1)
    kept += rest > half or (rest == half and kept & 1)
    value = math.ldexp(kept, exponent + drop)
    return value if value <= torch.finfo(torch.float32).max else math.inf


def _device(grads: Sequence[Tensor], groups: Sequence[Any]) -> torch.device:
    """Where the collectives run, which a rank without gradients must know too."""
    if any("nccl" in dist.get_backend_config(group) for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return grads[0].device if grads and not groups else torch.device("cpu")


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _groups_of_dtensors(grads: list[Tensor]) -> list[Any]:
    """The one group that DTensors are spread over; none for plain tensors."""
    groups = [grad.device_mesh.get_group() if isinstance(grad, DTensor) else None for grad in grads]
    if any(group != groups[0] for group in groups):
        raise ConfigError("gradients of several data-parallel groups, or only some of them DTensors, cannot be summed")
    return [group for group in groups[:1] if group is not None]
