"""One ledger for every cp at a fixed number of context shards. In `make test`: test_invariance.py, with the control."""

import dataclasses

import pytest

from tests.distributed.scenario import agree, unequal
from tests.distributed.small_models import BUCKETS, DISTRIBUTED, GATHER, small

DENSE = "qwen3_toy seq=64 model.num_layers=1"
FIXED = "iters=2 gbs=2 numerics.data_shards=2 numerics.context_shards=2 validation.eval_iters=1"
UNTIED = "model.share_embeddings_and_output_weights=false"

pytestmark = [pytest.mark.release, pytest.mark.timeout(2400)]

# Layouts that have one ledger; the first is one rank.
LAYOUTS = (
    "",
    "cp=2",
    "cp=2 mbs=2",
    "cp=4",
    f"cp=4 tp=2 {DISTRIBUTED}",
    "tp=2",
    "tp=2 cp=2",
    "tp=4 cp=2",
    "tp=2 cp=2 sp=false",
    f"dp=2 cp=2 {BUCKETS}",
    f"dp=2 cp=2 {GATHER}",
    f"tp=2 dp=4 {GATHER}",
    "pp=2 cp=2",
    f"pp=2 cp=2 dp=2 {GATHER}",
)

# Of a model with experts: their owners take part of a tensor-parallel group, of a context-parallel one, and of both and
# data-parallel ranks.
EXPERTS = small("qwen3_moe_toy")
EXPERT_LAYOUTS = (
    "",
    f"cp=2 dp=2 ep=4 {GATHER}",
    "cp=2",
    "cp=2 ep=2",
    "tp=2",
    "tp=2 cp=2",
    "tp=2 cp=2 ep=2",
    f"tp=2 cp=2 ep=4 dp=2 {BUCKETS}",
    f"tp=2 cp=2 ep=8 dp=2 {GATHER}",
    f"dp=2 cp=2 ep=2 {DISTRIBUTED}",
    "pp=2 cp=2 ep=2",
)


@pytest.mark.parametrize("more", ("", UNTIED, "precision=fp32"))
def test_one_ledger_for_more_layouts(scenario, more):
    fixed = f"iters=3 gbs=8 model.num_layers=2 numerics.data_shards=4 numerics.context_shards=4 {more}"
    agree(scenario("qwen3_toy seq=64", fixed), LAYOUTS)


def test_one_ledger_for_experts(scenario):
    agree(scenario(EXPERTS, FIXED), EXPERT_LAYOUTS)


def _added_by_the_library() -> None:
    import torch.distributed as dist

    from tp_invariant_recipes.numerics.sums import bucket_reduction

    def all_reduce(partials, group, cp, copies=1):
        for other in partials[1:]:
            partials[0].add_(other)
        if group.size() > 1:
            dist.all_reduce(partials[0], group=group)

    bucket_reduction.all_reduce = all_reduce


def _product_of_all_shards() -> None:
    """Let a weight gradient be one product of all tokens that a rank has."""
    from tp_invariant_recipes.numerics.layers.formats import plain

    def single_product(self, weight, grad, tokens, mesh, **shards):
        first = lambda out, add: self.products.product(grad.t(), tokens, out, add=add, **shards)  # noqa: E731
        return plain.weight_gradient(weight, first, *[lambda out, add: None] * (mesh.contexts - 1))

    plain.Plain.weight_gradient = single_product


def _norms_of_all_shards() -> None:
    """Let a norm's weight gradient be one tree over all chunks, all of it in the first context shard's place."""
    from tp_invariant_recipes.numerics.sums import partial_gradient

    original = partial_gradient._total

    def total(*args):
        result = original(*args)
        result[0] = result.sum(0)
        result[1:] = 0
        return result

    partial_gradient._total = total


# Each with a layout that has another ledger without it. What else cp needs, no layout would have the same loss without.
INGREDIENTS = {
    "tree over context shards": (_added_by_the_library, "cp=2 dp=2"),
    "products of a shard": (_product_of_all_shards, "cp=1"),
    "norms of a shard": (_norms_of_all_shards, "cp=1"),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, ingredient):
    plant, layout = INGREDIENTS[ingredient]
    dense = scenario(DENSE, FIXED)
    assert unequal(dense(layout).planted(plant).ledger(), dense.ledger())


def _tokens_grouped_by_expert() -> None:
    """Let an owner have one product of an expert's tokens of all context shards."""
    from tp_invariant_recipes.numerics.layers.experts.expert_placement import Owners

    placed = Owners.from_config.__func__
    Owners.from_config = classmethod(
        lambda cls, *given: dataclasses.replace(placed(cls, *given), sources=1, parts=1, chain=(0,))
    )


def test_experts_need_separate_context_shards(scenario):
    alone = scenario(EXPERTS, FIXED)
    assert unequal(alone.planted(_tokens_grouped_by_expert).ledger(), alone.ledger())
