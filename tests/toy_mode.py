# SPDX-License-Identifier: Apache-2.0
"""A mode of the tests' own, all that a new arithmetic needs: the sums of numerics=tree on products rounded to fp8."""

import torch

from tp_invariant_recipes.numerics.layers.formats.plain import LIBRARY, Gemms, Plain
from tp_invariant_recipes.numerics.tree_modes import Tree


def gemm(a, b, out, **shards):
    """As `numerics.gemm.gemm.gemm`, with operands that keep three bits."""
    return LIBRARY.gemm(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (a, b)), out, **shards)


def partials(a, b, *shards):
    """As `numerics.gemm.cpu.partials`, with operands that keep three bits."""
    return LIBRARY.partials(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (a, b)), *shards)


class Toy(Tree):
    """Dense models only."""

    name = "toy"
    covers = frozenset()

    def operands(self):
        return Plain(Gemms(gemm, partials))

    def definition(self, device):
        return "toy 1"


MODE = Toy()
