"""The limits of the invariant numerics with CUDA graphs, beyond those of Megatron-Bridge (settings/cuda_graphs.py).

The trials of numerics/products/cublas.py and numerics/layers/attention.py wait for the GPU. They happen in the steps
before a capture; a product that a capture meets first is one of fixed tiles, attention is launched shard by shard.
"""

import os

from tp_invariant_recipes.check import guard
from tp_invariant_recipes.check.invariant.limit import Test, limit_of
from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.cuda_graphs import FULL, IMPLEMENTATIONS, NOT_INVARIANT, TE
from tp_invariant_recipes.settings.run_config import RunConfig

CHECK = "TPI_CHECK_PRODUCTS"


def _captured_with(config: RunConfig) -> frozenset[str]:
    """Options of cuda_graph= that the layers of a run's mode were captured with."""
    return config.numerics.arithmetic.graphs if config.numerics.arithmetic else frozenset()


def _row(kinds: tuple[str, ...], wrong: Test, text: str, solve: str = "") -> Rule[RunConfig]:
    """kinds: of graphs that the row is about."""
    return limit_of(lambda t: t.model.get("cuda_graph_impl") in kinds, wrong, text, solve)


LIMITS = (
    _row(
        (FULL, TE),
        lambda t: not _captured_with(t),
        "its layers have not been captured",
        "cuda_graph=off, or numerics=tree",
    ),
    _row(
        (TE,),
        lambda t: _captured_with(t) == {IMPLEMENTATIONS[FULL]},
        "its layers have been captured with the whole step only",
        "cuda_graph=full, or off",
    ),
    _row(
        (TE,),
        lambda t: (t.numerics.context_shards or 1) > 1,
        "a captured layer gets a mask, which attention with context shards does not take",
        "cuda_graph=full, or off",
    ),
    _row(
        (TE,),
        lambda t: {*NOT_INVARIANT} & {*(t.model.get("cuda_graph_modules") or ())},
        f"{' and '.join(NOT_INVARIANT)} have been captured with the whole step only",
        "leave them out of model.cuda_graph_modules, or cuda_graph=full",
    ),
    _row(
        (FULL,),
        lambda t: t.layout.pp > 1,
        "stages wait for each other where a captured step cannot",
        "pp=1, or with numerics=tree cuda_graph=te",
    ),
    _row(
        (FULL,),
        lambda t: t.shape.experts > 1 and _captured_with(t) == {IMPLEMENTATIONS[FULL]},
        "experts have not been captured",
        "cuda_graph=off, or numerics=tree",
    ),
    _row(
        (FULL,),
        lambda t: t.shape.experts > 1 and t.guard.kind == guard.PRODUCTS,
        "guard=products samples no product of experts in a graph of the whole step",
        "cuda_graph=te, or guard=off",
    ),
    _row(
        (FULL,),
        lambda t: t.shape.experts > 1 and (low_precision.enabled(t) or t.shape.biased),
        "experts in FP8 or with biases wait for numbers of tokens from the GPU where a captured step cannot",
        "cuda_graph=te, or off",
    ),
    _row(
        (FULL, TE),
        lambda t: (t.cluster.environment | dict(os.environ)).get(CHECK) == "1",
        f"{CHECK}=1 compares products where a captured step cannot wait",
        "cuda_graph=off, or leave it unset",
    ),
)
