"""The version of a product of numerics=tree, as a ledger's header names it (`product` in `device`).

Imports nothing, so that a plan can read it. Whoever changes what products/product.py computes so that a bit changes on
a GPU raises the number; runs of two versions need not be equal. portable/definition.py has the version of `portable`.
"""

# On a GPU: what kernels/fixed_tile_product.py computes. Without a name: what a library gives for one shard, on its own
# shapes. That is the definition on a CPU, and was that of GPUs before the first name.
ON_GPU = "fixed tiles 1"


def product_version(mode: str, device: str) -> str | None:
    """mode: of numerics. device: "cpu" or "gpu"."""
    return ON_GPU if mode == "tree" and device == "gpu" else None
