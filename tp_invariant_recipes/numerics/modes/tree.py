"""numerics=tree, the default: every sum that crosses ranks is a tree over virtual shards."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.replacement import Replacement

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers import cross_entropy, norm
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain

# On a GPU: what kernels/products/fixed_tile_product.py computes. Whoever changes what numerics/products/product.py
# computes so that a bit changes on a GPU raises the number: runs of two versions need not be equal. On a CPU a product
# is what a library gives for one shard, on the shard's own shape; that has no name. Triton's version belongs to the
# name: it compiles these tiles, and the sums over rows of norms and losses.
ON_GPU = f"fixed tiles 1 (Triton {installed('triton')})"


class Tree:
    """Equal bits for every layout on one GPU architecture, and for every layout on one kind of CPU.

    Every mode derives from it: an arithmetic whose bits do not depend on the layout.

    name:             the value of numerics.mode.
    covers:           of mode.EXPERTS … FP64_NORM, what it has invariant versions of; check/invariant/ refuses the rest.
    graphs:           options of cuda_graph= that its layers were captured with.
    any_machine:      whether every machine that computes it gives the same bits, not one architecture alone.
    tries_products:   whether cuBLAS computes after a trial (numerics/products/defined.py), at a cost in memory.
    gathers_operands: whether a rank holds whole operands of a split product.
    layers:           stock class -> MODULE:CLASS of this package, where they differ from megatron/spec.py's table.
    """

    name: str = "tree"
    covers: frozenset[str] = frozenset(
        {
            mode.EXPERTS,
            mode.HYBRID,
            mode.LATENT,
            mode.DELTA_NET,
            mode.GATES,
            mode.MTP,
            mode.FAMILIES,
            mode.CENTRED,
            mode.LAYER_NORM,
            mode.LEARNED,
            mode.PACKED,
            mode.LORA,
            mode.FINETUNING,
            mode.TOKEN_LOSS,
            mode.CONTEXT_SHARDS,
            mode.FP8,
            mode.GUARD,
        }
    )
    graphs: frozenset[str] = mode.ALL_GRAPHS
    any_machine: bool = False
    tries_products: bool = True
    gathers_operands: bool = False
    layers: Mapping[str, str] = MappingProxyType({})

    def definition(self, device: str) -> str | None:
        """Return the version of a product as a ledger's header names it (`product` in `device`); None: a library's.

        device: "cpu" or "gpu".
        """
        return ON_GPU if device == "gpu" else None

    def require_machine(self, gpu: int | None, *, fp8: bool = False) -> None:
        """Raise RunError if the device computes other bits than the mode defines.

        Any machine will do whose fixed tiles walk k in order: products are defined on the one at hand.

        gpu: its index; None: the CPU. fp8: the run has products in FP8.
        """
        if gpu is not None:
            from tp_invariant_recipes.numerics.products.order import require_order

            require_order(f"cuda:{gpu}")

    def operands(self) -> "Plain":
        """Return what the layers' products compute with, in bf16 or fp32 (numerics/layers/formats/)."""
        from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN

        return PLAIN

    def norm(self) -> "norm.NormKernels":
        """Forward and backward pass of RMSNorm."""
        from tp_invariant_recipes.numerics.layers import norm

        return norm.LIBRARY

    def cross_entropy(self) -> "cross_entropy.LossKernels":
        """Return sums and gradients over the vocabulary."""
        from tp_invariant_recipes.numerics.layers import cross_entropy

        return cross_entropy.LIBRARY

    def replacements(self) -> tuple[Replacement, ...]:
        """Rows beyond those of megatron/replacements.py."""
        return ()


MODE = Tree()
