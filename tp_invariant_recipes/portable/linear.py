"""Column- and row-parallel products of numerics=portable, added as numerics/layers/linear/linear.py does."""

from torch import Tensor

from tp_invariant_recipes.numerics.layers.linear import linear
from tp_invariant_recipes.numerics.products import defined
from tp_invariant_recipes.numerics.products.operands import Parts
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

DEFINED = linear.Products(defined.product, defined.partials)


def column_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, segments: Parts, sequence_parallel: bool) -> Tensor:
    """As `tree_linear.column_parallel`, bf16."""
    return linear.column_parallel(x, weight, mesh, segments, sequence_parallel, DEFINED)


def row_parallel(x: Tensor, weight: Tensor, mesh: VirtualMesh, sequence_parallel: bool) -> Tensor:
    """As `tree_linear.row_parallel`, bf16."""
    return linear.row_parallel(x, weight, mesh, sequence_parallel, DEFINED)
