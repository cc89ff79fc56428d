# SPDX-License-Identifier: Apache-2.0
"""The exact 2-norm of all gradients, with the same bits for any sharding, bucketing, order or DP layout.

A fp32 number is m · 2^x with an integer m, |m| < 2^24. With X the largest x of all gradients on all ranks,

    q = floor(m² · 2^14 · 2^(-2 · (X - x)))
    norm = sqrt(sum of q) · 2^(X - 7)

    X - x          0        1             7        8              30        31 and more
    m² lies at     61..14   59..12  ...   47..0    45..-2   ...   1..-46    below bit 0
    q is           exact    exact         exact    cut at bit 0             0

and the sum is one of integers (kernels/grad_norm.py does it, in limbs that cannot overflow): exact, in any order.

The part cut off an element depends only on that element and X, and is less than one unit. The largest element alone
adds at least 2^60 units to the sum (if it is subnormal, X - x = 0 for all and nothing is cut). So the norm of n
elements is too small by less than n · 2^-61 of it: for n < 2^36, less than half an ulp of fp32. Only the square root is
rounded, to fp32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.function_modes import outside_modes
from tp_invariant_recipes.kernels import grad_norm as kernels

# Optimizers whose step is under way.
_under_way: list[Any] = []


class PendingNorm:
    """A norm that the GPU may still be computing. What Megatron's step does with a norm waits for it."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    @cached_property
    def value(self) -> float:
        """The number."""
        return self._read()

    def __float__(self) -> float:
        return self.value

    def __add__(self, other: float) -> float:
        return self.value + other

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __str__(self) -> str:
        return str(self.value)


def pending(read: Callable[[], float]) -> PendingNorm | float:
    """Return the norm that `read` waits for: pending for a step of `reading_late`, for all others the number."""
    return PendingNorm(read) if _under_way else read()


def reading_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ChainedOptimizer.step of megatron.core.optimizer.optimizer, made from that function.

    Its caller gets a number.
    """

    @wraps(original)
    def step(self: Any) -> tuple[bool, float | None, int | None]:
        _under_way.append(self)
        try:
            updated, norm, zeros = original(self)
        finally:
            _under_way.pop()
        return updated, None if norm is None else float(norm), zeros

    return step


def optimizers_under_way() -> Sequence[Any]:
    """Return the optimizers of the chain whose step is under way."""
    return _under_way[-1].chained_optimizers if _under_way else ()


INFINITE = 0x7F800000  # the bits of inf; the bits of any NaN, without the sign, are larger
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def get_grad_norm_fp32(
    grads_for_norm: list[Tensor] | Tensor, norm_type: int | float = 2, grad_stats_parallel_group: Any = None
) -> float:
    """Replace the function of this name in megatron.core.optimizer.clip_grads.

    grads_for_norm: the gradients that this rank counts, without replicas.
    grad_stats_parallel_group: the group to sum over, after the data-parallel group of DTensors; None: the whole world.
    """
    grads, groups = _as_megatron_means(grads_for_norm, norm_type, grad_stats_parallel_group)
    return exact_grad_norm(grads, groups, _known[-1] if _known else None)


@torch.no_grad()
def chained_grad_norm(self: Any) -> PendingNorm | float:
    """Replace ChainedOptimizer.get_grad_norm: one norm of the gradients of all its optimizers.

    With experts there are two optimizers, each with its own group of ranks; the layout decides each one's parameters.
    returns: in the step of numerics/sums/grad_norm.py a norm that is read when it is used.
    """
    chained = self.chained_optimizers
    parts = [
        _as_megatron_means(optimizer.get_grads_for_grad_norm(), 2, optimizer.get_grad_stats_parallel_group())
        for optimizer in chained
    ]
    return pending(_exact_norm(parts, _known[-1] if len(chained) == 1 and _known else None))


_known: list[Tensor] = []


@contextmanager
def largest_known(largest: Tensor) -> Iterator[None]:
    """Save `get_grad_norm_fp32` one pass over the gradients within a `with` block.

    largest: the result of `largest` in kernels/grad_norm.py for all gradients on this rank, including replicas, which
             do not change the maximum over all ranks. The gradients must not change in between.
    """
    _known.append(largest)
    try:
        yield
    finally:
        _known.pop()


def fp64_grad_norm(
    grads_for_norm: list[Tensor] | Tensor, norm_type: int | float = 2, grad_stats_parallel_group: Any = None
) -> float:
    """Replace the same function by the published scheme: a sum of squares in fp64, rounded once to fp32.

    It is not invariant: like any sum of floats it depends on its order. The rounding to fp32 hides most of these
    differences. tpi keeps it for comparison.
    """
    return _fp64_grad_norm(*_as_megatron_means(grads_for_norm, norm_type, grad_stats_parallel_group))


def rounded_down_to_power_of_two(coefficient: float) -> float:
    """Return the largest power of two that does not exceed the coefficient; 0, inf and nan stay unchanged."""
    if not 0 < coefficient < math.inf:
        return coefficient
    return math.ldexp(0.5, math.frexp(coefficient)[1])


def clip_by_powers_of_two(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32, made from that
    function.

    It rounds a coefficient below 1 down to a power of two. The GEMM with a gradient is then exact unless it is
    subnormal. The clipped norm is between half of max_norm and max_norm, so training differs from Megatron's.
    """

    def clip_grad_by_total_norm_fp32(
        parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
    ) -> None:
        coefficient = float(max_norm / (total_norm + 1.0e-6))  # as in the original
        if coefficient < 1.0:
            max_norm, total_norm = rounded_down_to_power_of_two(coefficient), _UNIT_NORM
        original(parameters, max_norm, total_norm, use_decoupled_grad)

    return clip_grad_by_total_norm_fp32


_UNIT_NORM = 1.0 - 1.0e-6  # the original adds 1e-6 to it and gets exactly 1.0


def _as_megatron_means(
    grads_for_norm: list[Tensor] | Tensor, norm_type: int | float, group: Any
) -> tuple[list[Tensor], list[Any]]:
    """Return this rank's gradients and the groups to sum over, from the arguments of Megatron's function."""
    if float(norm_type) != 2.0:
        raise ConfigError(f"norm_type={norm_type}: only the 2-norm of the gradients is invariant; set norm_type=2")
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else list(grads_for_norm)
    group = dist.group.WORLD if group is None else group
    groups = [grad.device_mesh.get_group() if isinstance(grad, DTensor) else None for grad in grads]
    if any(group != groups[0] for group in groups):
        raise ConfigError("gradients of several data-parallel groups, or only some of them DTensors, cannot be summed")
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    return local, [*[group for group in groups[:1] if group is not None], group]


@torch.no_grad()
def exact_grad_norm(grads: Sequence[Tensor], groups: Iterable[Any] = (), known: Tensor | None = None) -> float:
    """sqrt(sum of g²) over all elements of all ranks, rounded once to fp32; the same bits on every rank.

    grads:  this rank's gradients of any shape and number, also none, in fp32, bf16 or fp16.
    groups: process groups to sum over, one after the other; none means this rank alone. All ranks must call.
    known:  this rank's largest magnitude, if it is already known.
    returns: nan if there is a NaN anywhere, else inf if there is an infinity or the norm is beyond fp32.
    """
    return _exact_norm([(grads, list(groups))], known)()


@outside_modes
def _exact_norm(
    parts: Sequence[tuple[Sequence[Tensor], list[Any]]], known: Tensor | None = None
) -> Callable[[], float]:
    """Start the norm of gradients in several parts, each with the groups to sum it over; the result waits for it."""
    everything = [grad for grads, _ in parts for grad in grads]
    for grad in everything:
        if grad.dtype not in DTYPES:
            raise TypeError(f"a gradient of {grad.dtype}; the exact norm is for fp32, bf16 and fp16")
    device = _device(everything, [group for _, groups in parts for group in groups])

    largest = torch.zeros((), dtype=torch.int64, device=device)
    on_devices = [tensors for grads, _ in parts for tensors in _by_device(grads)]
    for bits in (known,) if known is not None else map(kernels.largest, on_devices):
        largest = torch.maximum(largest, bits.to(device))
    # All parts need one scale, and the ranks of one part would find another than those of the next.
    for group in parts[0][1] if len(parts) == 1 else [dist.group.WORLD]:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)

    total = torch.zeros(kernels.LIMBS, dtype=torch.int64, device=device)
    for grads, groups in parts:
        total += _limbs(grads, groups, largest)
    return partial(_read, torch.cat((largest.view(1), total)))


def _limbs(grads: Sequence[Tensor], groups: list[Any], largest: Tensor) -> Tensor:
    """Sum the squares of gradients, of all ranks. returns: [LIMBS] int64 on the device of `largest`."""
    limbs = torch.zeros(kernels.LIMBS, dtype=torch.int64, device=largest.device)
    for tensors in _by_device(grads):
        limbs += kernels.square_limbs(tensors, largest.to(tensors[0].device)).to(largest.device)
    for group in groups:
        dist.all_reduce(limbs, op=dist.ReduceOp.SUM, group=group)
    return limbs


@outside_modes
def _read(limbs: Tensor) -> float:
    """Compute the norm. limbs: the bits of the largest magnitude, and the limbs of the sum."""
    bits, *places = limbs.tolist()
    if bits >= INFINITE:
        return math.nan if bits > INFINITE else math.inf
    whole = sum(part << (kernels.LIMB * place) for place, part in enumerate(places))
    return _rounded_root(whole, max(bits >> 23, 1) - 150 - 7)


def _by_device(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[grad for grad in grads if grad.device == place] for place in {grad.device for grad in grads}]


@torch.no_grad()
def _fp64_grad_norm(grads: Sequence[Tensor], groups: Sequence[Any]) -> float:
    total = torch.zeros((), dtype=torch.float64, device=_device(grads, groups))
    for grad in grads:
        for piece in grad.detach().reshape(-1).split(kernels.PIECE):
            total += piece.double().square_().sum().to(total.device)
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.sqrt_().float().item()


def _rounded_root(square: int, exponent: int) -> float:
    """sqrt(square) · 2^exponent, rounded to the nearest fp32, ties to even."""
    if square == 0:
        return 0.0
    more = max(0, 64 - square.bit_length() // 2)  # at least 64 bits of root, and a sticky bit for the rest
    root = math.isqrt(square << 2 * more)
    root, exponent = root << 1 | (root * root != square << 2 * more), exponent - more - 1
    drop = max(root.bit_length() - 24, -149 - exponent)
    kept, rest, half = root >> drop, root & ((1 << drop) - 1), 1 << (drop - 1)
    kept += rest > half or (rest == half and kept & 1)
    value = math.ldexp(kept, exponent + drop)
    return value if value <= torch.finfo(torch.float32).max else math.inf


def _device(grads: Sequence[Tensor], groups: Sequence[Any]) -> torch.device:
    """Return the device of the collectives, which a rank without gradients must know too."""
    if any("nccl" in dist.get_backend_config(group) for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return grads[0].device if grads and not groups else torch.device("cpu")
