"""Matrices that Muon gathers: whole, in the order of one rank, and back, for every kind of cut."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import on_ranks
from tp_invariant_recipes.numerics.megatron import init
from tp_invariant_recipes.numerics.megatron.muon import MatrixCut, gathered, part_of

# The dimension, and a rank's rows or columns of each segment: q, k and v; gate and up; of Mamba; columns; not cut.
CUTS = (MatrixCut(0, (6,)), MatrixCut(0, (3, 3)), MatrixCut(0, (4, 4, 2, 2, 1)), MatrixCut(1, (4,)), None)


def _there_and_back(mesh, cut):
    local = [6, 8] if cut is None else [sum(cut.sizes) if d == cut.dim else 8 for d in range(2)]
    rank, ranks, dim, sizes = (0, 1, 0, 1) if cut is None else (mesh.rank, mesh.size, cut.dim, cut.sizes)
    shape, ranges = init.place(local, dim, rank, ranks, sizes)
    whole = torch.arange(shape[0] * shape[1]).view(shape).float()
    rows, columns = (torch.cat([torch.arange(*value) for value in segments]) for segments in ranges)
    part = whole[rows][:, columns]
    result = gathered(part.mT.contiguous().mT, cut, dist.group.WORLD)
    back = part_of(result.mT.contiguous().mT, cut, dist.group.WORLD)  # as Newton-Schulz steps of a tall matrix leave it
    return torch.equal(result, whole), torch.equal(back, part), result.is_contiguous(), back.is_contiguous()


@pytest.mark.parametrize("cut", CUTS)
def test_a_matrix_is_gathered_in_the_order_of_one_rank(cut):
    assert on_ranks(2, 4, _there_and_back, cut) == [(True,) * 4] * 2
