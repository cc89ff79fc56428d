"""One ledger for every cp at a fixed number of context shards, end to end.

`stock` is the control, from equal weights.
"""

import pytest

from tests.distributed.faults import without
from tests.distributed.scenario import agree, stock_differs, unequal
from tests.distributed.small_models import small
from tp_invariant_recipes.ledger.open import read

DENSE = "qwen3_toy seq=64 model.num_layers=1"
FIXED = "iters=2 gbs=2 numerics.data_shards=2 numerics.context_shards=2 validation.eval_iters=1"
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
BUCKETS = "ddp.overlap_grad_reduce=true ddp.bucket_size=20000"  # several buckets a rank
GATHER = f"{DISTRIBUTED} {BUCKETS} ddp.overlap_param_gather=true optimizer.overlap_param_gather=true"
UNTIED = "model.share_embeddings_and_output_weights=false"

# Layouts that have one ledger; the first is one rank.
LAYOUTS = ("", f"cp=2 {GATHER}")
LONGER = (
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


@pytest.mark.timeout(1200)
def test_one_ledger_for_all_layouts(scenario):
    agree(scenario(DENSE, FIXED), LAYOUTS)


@pytest.mark.release
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("more", ("", UNTIED, "precision=fp32"))
def test_one_ledger_for_more_layouts(scenario, more):
    fixed = f"iters=3 gbs=8 model.num_layers=2 numerics.data_shards=4 numerics.context_shards=4 {more}"
    agree(scenario("qwen3_toy seq=64", fixed), LONGER)


@pytest.mark.release
@pytest.mark.timeout(2400)
def test_one_ledger_for_experts(scenario):
    agree(scenario(EXPERTS, FIXED), EXPERT_LAYOUTS)


@pytest.mark.release
@pytest.mark.parametrize("model", ("llama32_toy", "qwen25_toy"))
def test_one_ledger_for_every_family(scenario, model):
    agree(scenario(model, "seq=64 gbs=2 iters=2 numerics.context_shards=2"), ("cp=1 tp=1", "cp=2 tp=2"))


def test_stock_does_not(scenario):
    stock_differs(scenario(DENSE, "iters=1 gbs=2"), ("cp=1", "cp=2"))


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


def _positions_as_they_lie() -> None:
    """Let a rank's tokens have the rotary positions that follow each other."""
    from tp_invariant_recipes.numerics.megatron.attention import context_parallel

    held = context_parallel._held

    def in_order(length, shards, group, like):
        if like.dim() == 2:  # tokens of the batch
            return held(length, shards, group, like)
        size, rank = group.size(), group.rank()
        return held(length, 1, None, like).chunk(size)[rank]

    context_parallel._held = in_order


def _attention_out_of_order() -> None:
    """Let attention have the tokens as the ranks hold them."""
    from tp_invariant_recipes.numerics.layers import head_exchange

    head_exchange._places = head_exchange._positions = lambda length, shards, device: slice(None)


def _heads_not_exchanged() -> None:
    """Let each rank attend to its own tokens alone."""
    from tp_invariant_recipes.numerics.layers import head_exchange

    head_exchange._moved = lambda parts, exchange: parts.clone()


# Each with a layout that has another ledger without it.
INGREDIENTS = {
    "tree over context shards": (_added_by_the_library, "cp=2 dp=2"),
    "products of a shard": (_product_of_all_shards, "cp=1"),
    "norms of a shard": (_norms_of_all_shards, "cp=1"),
    "tokens of a shard": (without("get_batch_on_this_cp_rank"), "cp=1"),
    "rotary positions": (_positions_as_they_lie, "cp=2"),
    "order of the tokens in attention": (_attention_out_of_order, "cp=2"),
    "exchange of heads": (_heads_not_exchanged, "cp=2"),
    "count of all ranks' tokens": (without("masked_next_token_loss"), "cp=2"),
}


@pytest.mark.release
@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, ingredient):
    plant, layout = INGREDIENTS[ingredient]
    dense = scenario(DENSE, FIXED)
    assert unequal(dense(layout).planted(plant).ledger(), dense(LAYOUTS[0]).ledger())


def _tokens_grouped_by_expert() -> None:
    """Let an owner have one product of an expert's tokens of all context shards."""
    from tp_invariant_recipes.numerics.layers.experts import token_dispatcher

    token_dispatcher.of_a_rank = lambda config: 1


@pytest.mark.release
def test_experts_need_separate_context_shards(scenario):
    alone = scenario(EXPERTS, FIXED)
    assert unequal(alone.planted(_tokens_grouped_by_expert).ledger(), alone.ledger())


@pytest.mark.release
def test_verify_takes_the_largest_cp(scenario, tpi):
    """And without it, two runs with a shard for each rank are not comparable, which names the key."""
    tpi("verify", *DENSE.split(), "iters=1", "cp=1,2", "--dir", "cells", status=0)
    assert {read(tpi.folder / "cells" / cell).header.numerics["context_shards"] for cell in ("cp1", "cp2")} == {2}
    single = scenario(DENSE, "iters=1 cp=1")
    single.ledger()
    compared = tpi("compare", single.run, "cells/cp1", status=2)
    assert "numerics.context_shards is 1 and 2; train both with numerics.context_shards=2" in compared.stdout
