# SPDX-License-Identifier: Apache-2.0
"""Live operands and results of a few GEMMs of a step, for a guard that computes them again (docs/guard.md).

A GEMM calls `begin` before it computes, and `end` of what that returns: None for all but the few that are chosen.
Which those are follows from a seed, the step and the rank alone, never from torch's generators.

    defined   16 rows of a and 16 columns of b, evenly spread from a drawn start, and their 256 results. Of evenly
              spread rows one lies in every tile as high as their distance; of drawn ones it may not
    library   one shard of the GEMM, whole: on a CPU a library's bits depend on the shape (numerics/gemm/cpu.py)
    repeated  a shard of core attention, which has no definition but its own launch

While a CUDA graph is captured the gathers become part of it: every replay fills the same memory.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.gemm.cublas import capturing
from tp_invariant_recipes.numerics.gemm.operands import Split, every_part, parts_of, without_gaps

T = TypeVar("T")

SIDE = 16  # rows and columns of a sample
DEFINED, LIBRARY, REPEATED = "defined", "library", "repeated"


@dataclass(frozen=True)
class Where:
    """Addresses of the operand b and of the result, and whether b lies transposed; layer: of attention, from 1."""

    b: int = 0
    out: int = 0
    transposed: bool = False
    layer: int | None = None


@dataclass(frozen=True)
class Sample:
    """Operands and results of a GEMM.

    kind:     one of DEFINED, LIBRARY, REPEATED.
    a, b:     [n, k] and [k, m]. Of REPEATED a is what the repetition gave, and there is no b.
    before:   [n, m], what the GEMM was added to; None: it was not.
    out:      [nodes, n, m]: `nodes` neighbours in the tree over `shards` shards of k.
    segments: the parts of k, each of `shards` shards.
    chained:  whether the segments' GEMMs are added to `before` one by one, not their sum.
    """

    kind: str
    a: Tensor
    b: Tensor | None
    before: Tensor | None
    out: Tensor
    shards: int = 1
    segments: tuple[int, ...] = ()
    where: Where = Where()
    chained: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the sample has, by name."""
        named = {"a": self.a, "b": self.b, "before": self.before, "out": self.out}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """Return the sample with changed tensors."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors.items()}
        return replace(self, **changed)


class Sampler:
    """Chooses `count` GEMMs of every step. seed: such as the run's, with the rank."""

    def __init__(self, count: int, seed: str) -> None:
        self.count, self.seed = count, seed
        self.samples: list[Sample] = []
        self.fixed: list[Sample] = []  # whose gathers a CUDA graph makes at each replay
        self.everything = False  # whether all GEMMs are sampled
        self._products = self._captured = 0
        self._chosen: set[int] = set(range(count))
        self.draw = random.Random(seed)

    def restart(self, step: int) -> None:
        """Begin a step: draw which of as many GEMMs as the last step had. The first step's are its first."""
        self.draw = random.Random(f"{self.seed} {step}")
        if self._products:
            self._chosen = set(self.draw.sample(range(self._products), min(self.count, self._products)))
            self._every = -(-self._products // self.count)
        self._products, self.samples = 0, []

    def wants(self, operand: Tensor) -> bool:
        """Whether the GEMM that comes next is to be sampled."""
        if capturing(operand):
            self._captured += 1
            return self._captured % getattr(self, "_every", 1) == 0
        self._products += 1
        return self.everything or self._products - 1 in self._chosen

    def drawn(self, shards: Sequence[T]) -> Sequence[T]:
        """Return the shards of a chosen GEMM that are sampled."""
        return shards if self.everything else [self.draw.choice(shards)]

    def keep(self, sample: Sample) -> None:
        """Take a sample; of a GEMM in a graph that is being captured, for all replays."""
        (self.fixed if capturing(sample.out) else self.samples).append(sample)


_sampler: Sampler | None = None


def use(sampler: Sampler | None) -> None:
    """Have this process's GEMMs sampled by it from now on; None: no longer."""
    global _sampler  # noqa: PLW0603 -- GEMMs have no configuration
    _sampler = sampler


@contextmanager
def paused() -> Iterator[None]:
    """Products in the block are no training step's: none is sampled."""
    sampler = _sampler
    use(None)
    try:
        yield
    finally:
        use(sampler)


class _Started:
    chained = False

    def __init__(self, kind: str, a: Tensor, b: Tensor, out: Tensor, add: bool, segments: tuple[int, ...]) -> None:
        assert _sampler is not None
        self.kind, self.sampler, self.segments = kind, _sampler, segments
        self.a, self.b, self.out = a, b, out
        self.rows = self.columns = slice(None)
        if kind == DEFINED:
            self.rows, self.columns = (_spread(size, _sampler.draw) for size in (a.shape[0], b.shape[1]))
        self.before = _copy(out[self.rows, self.columns]) if add else None

    def end(self, nodes: Tensor | None = None, shards: int = 1) -> None:
        """Take the sample. nodes: the result, [n, rows, columns], where it is not `out`."""
        out = self.out[None] if nodes is None else nodes
        where = Where(self.b.data_ptr(), self.out.data_ptr(), _transposed(self.b))
        a, b = self.a[self.rows], self.b[:, self.columns]
        a, b = (_copy(a), _copy(b)) if self.kind == DEFINED else (without_gaps(a).clone(), without_gaps(b).clone())
        out = _copy(out[:, self.rows, self.columns])
        self.sampler.keep(Sample(self.kind, a, b, self.before, out, shards, self.segments, where, self.chained))


def begin(a: Tensor, b: Tensor, out: Tensor, add: bool, segments: Sequence[int] | None = None) -> _Started | None:
    """Return a GEMM a @ b → out whose rows and columns are each defined by themselves. None: it is not chosen."""
    if _sampler is None or not (a.shape[0] and b.shape[1] and _sampler.wants(a)):
        return None
    return _Started(DEFINED, a.detach(), b.detach(), out.detach(), add, tuple(segments or (a.shape[1],)))


def begin_group(sizes: Sequence[int], gemm: Callable[[int, slice], tuple[Tensor, Tensor, Tensor]]) -> _Started | None:
    """One of several GEMMs in a launch, if the launch is chosen. sizes: rows of each; gemm: a, b and out of one.

    Operands without rows have no product.
    """
    groups = [n for n, size in enumerate(sizes) if size]
    if _sampler is None or not groups:
        return None
    number = _sampler.draw.choice(groups)
    start = sum(sizes[:number])
    return begin(*gemm(number, slice(start, start + sizes[number])), False)


def begin_chain(
    sizes: Sequence[int], chain: Sequence[int], dy: Tensor, x: Tensor, outs: Sequence[Tensor]
) -> _Started | None:
    """Return an output of `grouped_weight_gradient` (grouped_gemm.py), if the launch is chosen. sizes: of groups."""
    if _sampler is None or not sizes:
        return None
    links = [[n * len(chain) + link for link in chain if sizes[n * len(chain) + link]] for n in range(len(outs))]
    if not any(links) or not _sampler.wants(x):
        return None
    number = _sampler.draw.choice([n for n, link in enumerate(links) if link])
    starts = [0, *accumulate(sizes)]
    dy_chain, x_chain = (torch.cat([m[starts[g] : starts[g + 1]] for g in links[number]]) for m in (dy, x))
    segments = tuple(sizes[g] for g in links[number])
    started = _Started(DEFINED, dy_chain.detach().t(), x_chain.detach(), outs[number], True, segments)
    started.chained = True
    return started


def begin_library(a: Tensor, b: Tensor, out: Tensor, rows: Split, columns: Split, add: bool) -> list[_Started]:
    """Return a library's GEMM a @ b → out of a drawn shard; nothing: it is not chosen."""
    if _sampler is None or not (a.shape[0] and b.shape[1] and _sampler.wants(a)):
        return []
    a, b, out = a.detach(), b.detach(), out.detach()
    shards = [(a, b, out)]
    if rows != 1:
        shards = [(x, b, y) for x, y in zip(parts_of(a, rows, 0), parts_of(out, rows, 0), strict=True)]
    elif columns != 1:
        shards = [(a, x, y) for x, y in zip(parts_of(b, columns, 1), parts_of(out, columns, 1), strict=True)]
    return [_Started(LIBRARY, *shard, add, (a.shape[1],)) for shard in _sampler.drawn(shards)]


def take_partials(a: Tensor, b: Tensor, nodes: Tensor, shards: int, segments: tuple[int, ...]) -> None:
    """Of the sums of neighbouring shards of k, [n, rows, columns], by a library, take a drawn one, if it is chosen."""
    if _sampler is None or not _sampler.wants(a):
        return
    a, b, width = a.detach(), b.detach(), shards // len(nodes)
    where = Where(b.data_ptr(), 0, _transposed(b))
    own = tuple(size // len(nodes) for size in segments)  # in the layout of the operands
    cuts = every_part(segments, len(nodes))
    for number in _sampler.drawn(range(len(nodes))):
        a_part = torch.cat([a[:, part] for part in cuts[number]], 1)
        b_part = torch.cat([b[part] for part in cuts[number]])
        out = _copy(nodes[number][None])
        _sampler.keep(Sample(LIBRARY, _laid_like(a_part, a), _laid_like(b_part, b), None, out, width, own, where))


def repeat(out: Tensor, recompute: Callable[[int], Tensor], parts: int, layer: int | None) -> None:
    """Of core attention's result [..., n], which consists of `parts` parts, have a drawn one computed again, if it is
    chosen.

    recompute: computes part number n. layer: counted from 1.
    """
    if _sampler is None or not out.requires_grad or capturing(out) or not _sampler.wants(out):
        return
    where = Where(layer=layer)
    for number in _sampler.drawn(range(parts)):
        with torch.enable_grad():
            repeated = _copy(recompute(number).detach().flatten(0, -2))
        part = _copy(out.detach().chunk(parts, -1)[number].flatten(0, -2))[None]
        _sampler.keep(Sample(REPEATED, repeated, None, None, part, where=where))


def _spread(size: int, draw: random.Random) -> slice:
    step = max(1, size // SIDE)
    start = draw.randrange(max(1, size - step * (SIDE - 1)))
    return slice(start, min(size, start + step * (SIDE - 1) + 1), step)


def _copy(x: Tensor) -> Tensor:
    return torch.clone(x, memory_format=torch.contiguous_format)


def _laid_like(x: Tensor, like: Tensor) -> Tensor:
    """Return the matrix in the order of rows and columns in which `like` lies."""
    return x.t().contiguous().t() if _transposed(like) else x.contiguous()


def _transposed(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1
