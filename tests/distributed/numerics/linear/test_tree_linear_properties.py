"""Column- and row-parallel linear of any shape: one result for every degree that divides V, and an accurate one."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.numerics.linear.linear_runs import Layer, trained, unequal, whole
from tests.distributed.ranks import on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-42, 3e38)


@dataclass(frozen=True)
class Case:
    """rows, inner, chunk: output features and sequence positions of a shard, input features of a shard or in all."""

    layer: Layer
    dtype: torch.dtype
    rows: int
    inner: int
    chunk: int
    batch: int
    special: bool
    seed: int

    def tensors(self, shards: int) -> tuple[Tensor, ...]:
        """x, weight, bias, dy."""
        column = self.layer.column
        n = self.rows * shards * self.layer.segments if column else self.rows
        k = self.inner if column else self.inner * shards
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.chunk * shards, self.batch, k), (n, k), (n,), (self.chunk * shards, self.batch, n)
        results = [torch.randn(shape, generator=generator) for shape in shapes]
        if self.special:
            for tensor in results:
                places = torch.randint(tensor.numel(), (1 + tensor.numel() // 16,), generator=generator).tolist()
                for place, at in enumerate(places):
                    tensor.view(-1)[at] = SPECIAL[(place + self.seed) % len(SPECIAL)]
        return tuple(tensor.to(self.dtype) for tensor in results)


def _all(mesh, cases):
    return [trained(mesh, case.layer, case.tensors(mesh.shards), PLAIN) for case in cases]


def _same(a, b):
    """The same bits, and NaN where the other has NaN: which of the many NaNs it is, torch's vector and scalar code on a
    CPU do not agree, and where one ends and the other begins depends on how many features a rank has."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.masked_fill(a.isnan(), 0.0), b.masked_fill(b.isnan(), 0.0))


def _assert_accurate(case, shards, got):
    """Every element within the rounding of fp32 sums, and of one more to its dtype, of an fp64 reference."""
    x, weight, bias, dy = (t.double() for t in case.tensors(shards))
    before = torch.ones(()) if case.layer.main_grad else torch.zeros(())
    flat = x.flatten(0, 1), dy.flatten(0, 1)
    ones = torch.ones_like(dy[..., :1]).flatten(0, 1)
    sums = (  # a @ b, what is added
        (x, weight.t(), bias),
        (dy, weight, torch.zeros(())),
        (flat[1].t(), flat[0], before),
        (flat[1].t(), ones, before),
    )
    for result, (a, b, more) in zip(got, sums, strict=True):
        exact, size = a @ b + more, a.abs() @ b.abs() + more.abs()
        exact, size = exact.reshape(result.shape), size.reshape(result.shape)
        fp32 = (a.shape[-1] + shards + case.layer.segments + 1) * 2.0**-24
        bound = (fp32 + (2 * torch.finfo(result.dtype).eps if result.dtype != torch.float32 else 0)) * size
        assert ((result.double() - exact).abs() <= bound).all()


COLUMNS = st.builds(Layer, st.just(True), st.integers(1, 5), st.booleans(), st.booleans())
ROWS = st.builds(Layer, st.just(False), st.just(1), st.booleans(), st.booleans())
CASES = st.builds(
    Case,
    layer=st.one_of(COLUMNS, ROWS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    rows=st.integers(1, 9),
    inner=st.integers(1, 40),
    chunk=st.integers(1, 3),
    batch=st.integers(1, 3),
    special=st.sampled_from((False, False, False, True)),
    seed=st.integers(0, 1000),
)


# Many cases on one set of ranks, since a fork costs more than what it computes.
@pytest.mark.release
@pytest.mark.parametrize("shards, examples", ((1, 2), (2, 8), (4, 2), (8, 3), (16, 2)))
def test_one_accurate_result_for_all_degrees(shards, examples):
    @settings(max_examples=examples, derandomize=True)
    @given(cases=st.lists(CASES, min_size=20, max_size=20))
    def check(cases):
        degrees = [t for t in (1, 2, 4, 8, 16) if t <= shards]
        results = [zip(*on_ranks(t, shards, _all, cases), strict=True) for t in degrees]
        for case, *ranks in zip(cases, *results, strict=True):
            first, *others = (whole(of_degree, case.layer, _same) for of_degree in ranks)
            assert [unequal(first, other, _same) for other in others] == [[]] * len(others)
            if not case.special:
                _assert_accurate(case, shards, first)

    check()
