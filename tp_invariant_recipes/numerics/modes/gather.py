"""numerics=gather, the published scheme: the operand that is split is gathered and multiplied whole.

Transformer Engine's pull request 2977 and Megatron-LM's pull request 4740 describe it. Kept as a reference.
"""

from typing import TYPE_CHECKING

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.modes.tree import Tree

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain


class Gather(Tree):
    """Equal bits for every tp. Norms, the cross entropy and gradients are those of `tree`."""

    name: str = "gather"
    covers: frozenset[str] = frozenset({mode.FP64_NORM})
    graphs: frozenset[str] = frozenset()
    tries_products: bool = False
    gathers_operands: bool = True

    def definition(self, device: str) -> str | None:
        """None: its kernel of fixed tiles has no version."""
        return None

    def operands(self) -> "Plain":
        """Whole operands on every rank."""
        from tp_invariant_recipes.numerics.layers.formats.plain import GATHERED

        return GATHERED


MODE = Gather()
