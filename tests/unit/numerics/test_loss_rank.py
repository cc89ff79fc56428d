"""The place of a token among the logits."""

import torch

from tp_invariant_recipes.numerics.layers.cross_entropy import rank_of
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def test_the_largest_logit_has_place_1():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 2.0, 1.0]])
    for target, places in ((0, [4, 3]), (1, [1, 4]), (2, [3, 1])):
        assert rank_of(logits, torch.full((2,), target), VirtualMesh(4, 1, 0)).tolist() == places
