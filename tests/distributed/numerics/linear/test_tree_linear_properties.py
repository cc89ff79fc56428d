"""Column- and row-parallel linear of any shape: one result for every degree that divides V, and an accurate one."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.ranks import joined, on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.linear.linear import column_parallel, row_parallel

SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 1e-42, 3e38)


@dataclass(frozen=True)
class Case:
    """rows, inner, chunk: output features and sequence positions of a shard, input features of a shard or in all."""

    kind: str
    dtype: torch.dtype
    segments: int
    rows: int
    inner: int
    chunk: int
    batch: int
    sequence_parallel: bool
    bias: bool
    main_grad: bool
    special: bool
    seed: int

    def tensors(self, shards: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, weight, bias, dy."""
        column = self.kind == "column"
        n = self.rows * shards * self.segments if column else self.rows
        k = self.inner if column else self.inner * shards
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.chunk * shards, self.batch, k), (n, k), (n,), (self.chunk * shards, self.batch, n)
        results = [torch.randn(shape, generator=generator) for shape in shapes]
        if self.special:
            for tensor in results:
                places = torch.randint(tensor.numel(), (1 + tensor.numel() // 16,), generator=generator).tolist()
                for place, at in enumerate(places):
                    tensor.view(-1)[at] = SPECIAL[(place + self.seed) % len(SPECIAL)]
        x, weight, bias, dy = (tensor.to(self.dtype) for tensor in results)
        return x, weight, bias, dy


def _run(mesh, case):
    x, weight, bias, dy = case.tensors(mesh.shards)
    slices, segments = case.sequence_parallel, case.segments
    if case.kind == "column":
        x = sliced(x, 0, mesh) if slices else x
        weight, bias, dy = (sliced(t, d, mesh, segments) for t, d in ((weight, 0), (bias, 0), (dy, 2)))
    else:
        x, weight = sliced(x, 2, mesh), sliced(weight, 1, mesh)
        dy = sliced(dy, 0, mesh) if slices else dy
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
        if case.main_grad and leaf is not x:
            leaf.main_grad = torch.zeros(leaf.shape)
    for _ in range(2 if case.main_grad else 1):
        x.grad = None
        if case.kind == "column":
            y = column_parallel(x, weight, mesh, segments, slices)
            y = column_bias(y, bias) if case.bias else y
        else:
            y = row_parallel(x, weight, mesh, slices)
            y = row_bias(y, bias, mesh, slices) if case.bias else y
        y.backward(dy)
    name = "main_grad" if case.main_grad else "grad"
    return y.detach(), x.grad, getattr(weight, name), getattr(bias, name) if case.bias else None


def _all(mesh, cases):
    return [_run(mesh, case) for case in cases]


def _same(a, b):
    """The same bits, and NaN where the other has NaN: which of the many NaNs it is, torch's vector and scalar code on a
    CPU do not agree, and where one ends and the other begins depends on how many features a rank has."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.masked_fill(a.isnan(), 0.0), b.masked_fill(b.isnan(), 0.0))


def _only(parts):
    assert all(_same(part, parts[0]) for part in parts)
    return parts[0]


def _joined(case, ranks):
    """y, dx, dw, db of all ranks put together."""
    y, dx, dw, db = zip(*ranks, strict=True)
    if case.kind == "column":
        dx = joined(dx, 0) if case.sequence_parallel else _only(dx)
        db = joined(db, 0, case.segments) if case.bias else None
        return joined(y, 2, case.segments), dx, joined(dw, 0, case.segments), db
    y = joined(y, 0) if case.sequence_parallel else _only(y)
    if case.bias and case.sequence_parallel:  # Megatron adds these up: one rank has the sum
        assert not any(other.count_nonzero() for other in db[1:])
        db = db[0]
    elif case.bias:
        db = _only(db)
    return y, joined(dx, 2), joined(dw, 1), db if case.bias else None


def _assert_accurate(case, shards, got):
    """Every element within the rounding of fp32 sums, and of one more to its dtype, of an fp64 reference."""
    x, weight, bias, dy = (t.double() for t in case.tensors(shards))
    times = 2 if case.main_grad else 1
    flat = x.flatten(0, 1), dy.flatten(0, 1)
    ones = torch.ones_like(dy[..., :1]).flatten(0, 1)
    sums = (  # a @ b, how often, what is added, how many roundings to the dtype
        (x, weight.t(), 1, bias if case.bias else None),
        (dy, weight, 1, None),
        (flat[1].t(), flat[0], times, None),
        (flat[1].t(), ones, times, None),
    )
    for name, result, (a, b, n, more) in zip(("y", "dx", "dw", "db"), got, sums, strict=True):
        if result is None:
            continue
        exact, size = n * (a @ b), n * (a.abs() @ b.abs())
        if more is not None:
            exact, size = exact + more, size + more.abs()
        exact, size = exact.reshape(result.shape), size.reshape(result.shape)
        fp32 = (a.shape[-1] + shards + case.segments + n) * 2.0**-24
        bound = (fp32 + (2 * torch.finfo(result.dtype).eps if result.dtype != torch.float32 else 0)) * size
        assert ((result.double() - exact).abs() <= bound).all(), name


CASES = st.builds(
    Case,
    kind=st.sampled_from(("column", "row")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    segments=st.integers(1, 5),
    rows=st.integers(1, 9),
    inner=st.integers(1, 40),
    chunk=st.integers(1, 3),
    batch=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    bias=st.booleans(),
    main_grad=st.booleans(),
    special=st.sampled_from((False, False, False, True)),
    seed=st.integers(0, 1000),
)


# Many cases on one set of ranks, since a fork costs more than what it computes.
@pytest.mark.release
@pytest.mark.parametrize(
    "shards, examples",
    ((1, 2), (2, 8), (4, 2), (8, 3), (16, 2)),
)
def test_one_accurate_result_for_all_degrees(shards, examples):
    @settings(max_examples=examples, derandomize=True)
    @given(cases=st.lists(CASES, min_size=20, max_size=20))
    def check(cases):
        degrees = [t for t in (1, 2, 4, 8, 16) if t <= shards]
        results = {t: list(zip(*on_ranks(t, shards, _all, cases), strict=True)) for t in degrees}
        for n, case in enumerate(cases):
            first, *others = (_joined(case, results[t][n]) for t in degrees)
            for t, other in zip(degrees[1:], others, strict=True):
                for name, a, b in zip(("y", "dx", "dw", "db"), first, other, strict=True):
                    assert a is b is None or _same(a, b), f"{name} of {t} ranks"
            if not case.special:
                _assert_accurate(case, shards, first)

    check()
