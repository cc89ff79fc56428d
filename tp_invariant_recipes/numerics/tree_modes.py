# SPDX-License-Identifier: Apache-2.0
"""The modes whose sums across ranks are trees over virtual shards.

numerics=tree, the default, adds partial sums. numerics=gather is the published scheme, kept as a reference: it gathers
the operand that is split and multiplies it whole (Transformer Engine's pull request 2977, Megatron-LM's 4740).
"""

from typing import TYPE_CHECKING

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics import mode

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers import cross_entropy, norm
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain

# On a GPU: what kernels/gemm/fixed_tile_gemm.py computes. Whoever changes what numerics/gemm/gemm.py
# computes so that a bit changes on a GPU raises the number: runs of two versions need not be equal. On a CPU a GEMM
# is what a library gives for one shard, on the shard's own shape; that has no name. Triton's version belongs to the
# name: it compiles these tiles, and the sums over rows of norms and losses.
ON_GPU = f"fixed tiles 1 (Triton {installed('triton')})"


class Tree(mode.Mode):
    """Equal bits for every layout on one GPU architecture, and for every layout on one kind of CPU."""

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

    def definition(self, device: str) -> str | None:
        """Return the version of the fixed-tile GEMMs; on a CPU a library computes."""
        return ON_GPU if device == "gpu" else None

    def require_machine(self, gpu: int | None, *, fp8: bool = False) -> None:
        """Any machine will do whose fixed-tile GEMMs walk k in order: GEMMs are defined on the one at hand."""
        if gpu is not None:
            from tp_invariant_recipes.numerics.gemm.gemm import require_order

            require_order(f"cuda:{gpu}")

    def operands(self) -> "Plain":
        """Return those of the shards."""
        from tp_invariant_recipes.numerics.layers.formats.plain import PLAIN

        return PLAIN

    def norm(self) -> "norm.NormKernels":
        """Return the library's."""
        from tp_invariant_recipes.numerics.layers import norm

        return norm.LIBRARY

    def cross_entropy(self) -> "cross_entropy.LossKernels":
        """Return the library's."""
        from tp_invariant_recipes.numerics.layers import cross_entropy

        return cross_entropy.LIBRARY


TREE = Tree()


class Gather(Tree):
    """Equal bits for every tp. Norms, the cross entropy and gradients are those of `tree`."""

    name: str = "gather"
    covers: frozenset[str] = frozenset({mode.FP64_NORM})
    graphs: frozenset[str] = frozenset()
    tries_products: bool = False
    gathers_operands: bool = True

    def definition(self, device: str) -> str | None:
        """None: its kernel of fixed-tile GEMMs has no version."""
        return None

    def operands(self) -> "Plain":
        """Whole operands on every rank."""
        from tp_invariant_recipes.numerics.layers.formats.plain import GATHERED

        return GATHERED


GATHER = Gather()
