"""A mode of the tests' own, all that a new arithmetic needs: the sums of numerics=tree on products rounded to fp8."""

import torch

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.modes.tree import Tree


def product(a, b, out, **shards):
    """As `products.product.product`, with operands that keep three bits."""
    return linear.LIBRARY.product(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (a, b)), out, **shards)


def partials(a, b, *shards):
    """As `products.cpu.partials`, with operands that keep three bits."""
    return linear.LIBRARY.partials(*(x.to(torch.float8_e4m3fn).to(x.dtype) for x in (a, b)), *shards)


class _Rounded:
    """The two functions of `mode.Linear`."""

    products = linear.Products(product, partials)

    def column_parallel(self, *operands):
        return linear.column_parallel(*operands, self.products)

    def row_parallel(self, *operands):
        return linear.row_parallel(*operands, self.products)


class Toy(Tree):
    """Dense models only."""

    name = "toy"
    covers = frozenset()

    def linear(self):
        return _Rounded()

    def definition(self, device):
        return "toy 1"


MODE: mode.Mode = Toy()
