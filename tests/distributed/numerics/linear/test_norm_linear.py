"""A norm and the product after it as one function of autograd have the bits of two."""

import pytest
import torch

from tests.distributed.ranks import on_ranks, sliced
from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.layers.norm import Norm, NormShards, rms_norm

EPS, SHARDS, S, B, K, N = 1e-6, 8, 16, 2, 64, 48
WANTED = ((True, True, True), (True, False, False), (False, True, False), (False, False, True))


def in_single_call(x, gain, weight, mesh, segments, slices, shards_of):
    layer = linear.Column(mesh, segments, slices and mesh.size > 1)
    return linear.norm_column_parallel(x, gain, weight, EPS, Norm(mesh, shards_of), layer)


def separate(x, gain, weight, mesh, segments, slices, shards_of):
    return linear.column_parallel(rms_norm(x, gain, EPS, mesh, shards_of), weight, mesh, segments, slices)


def in_single_segment(x, gain, weight, mesh, segments, slices, shards_of):
    return separate(x, gain, weight, mesh, 1, slices, shards_of)


def step(mesh, form, dtype, slices, in_buffers, wanted):
    """Output and gradients of a rank; two micro-batches where gradients are added in Megatron's buffers."""
    generator = torch.Generator().manual_seed(7)
    x, gain, weight, dy = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((S, B, K), (K,), (2 * N, K), (S, B, 2 * N))
    )
    half = dy[..., :N]  # sums over features that cancel show every order of additions
    dy, weight = torch.cat((half, -half), 2), torch.cat((weight[:N], weight[:N] + weight[N:] / 64))
    x = (x.chunk(mesh.size)[mesh.rank] if slices else x).clone()
    leaves = [x, gain, sliced(weight, 0, mesh, 2).contiguous()]
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    if in_buffers:
        for leaf in leaves[1:]:
            leaf.main_grad = torch.zeros(leaf.shape)
    shards_of = NormShards.SEQUENCE_SLICE if slices else NormShards.SEQUENCE_WHOLE
    for _ in range(1 + in_buffers):
        y = form(*leaves, mesh, 2, slices, shards_of)
        y.backward(sliced(dy, 2, mesh, 2))
    gradients = [leaf.grad for leaf in leaves]
    return [y.detach(), gradients[0], *([leaf.main_grad for leaf in leaves[1:]] if in_buffers else gradients[1:])]


def steps(mesh, *cases):
    return [[step(mesh, form, *case) for form in (in_single_call, separate, in_single_segment)] for case in cases]


def equal(a, b):
    return all(x is y is None or same_bits(x, y) for x, y in zip(a, b, strict=True))


CASES = [
    (dtype, slices, in_buffers, WANTED[0])
    for dtype in (torch.float32, torch.bfloat16)
    for slices in (False, True)
    for in_buffers in (False, True)
]
CASES += [(torch.bfloat16, False, False, wanted) for wanted in WANTED[1:]]


@pytest.mark.parametrize("ranks", (1, 2))
def test_one_function_has_the_bits_of_two(ranks):
    """The control: the same with gate and up as one segment, whose sums have another order."""
    for rank in on_ranks(ranks, SHARDS, steps, *CASES):
        for (first, second, other), (*_, wanted) in zip(rank, CASES, strict=True):
            assert equal(first, second)
            assert [gradient is not None for gradient in first[1:]] == [*wanted]
            assert not wanted[0] or not equal(second, other)
