"""Multi-latent attention under `numerics=tree`: small DeepSeek-V3 and Moonlight have one ledger for all layouts."""

import pytest

from tests.distributed.faults import product_per_rank
from tests.distributed.scenario import agree, stock_differs, unequal
from tests.distributed.small_models import small

pytestmark = pytest.mark.release

FIXED = "iters=2 numerics.virtual_shards=4"

# Model, what is held fixed, the layouts that must agree, with digests of all gradients and weights at every step.
ROWS = (
    ("deepseek_v3_toy", "", ("tp=1", "tp=2 ep=2")),
    ("moonlight_toy", "", ("tp=1", "tp=2", "tp=4 ep=4")),
    ("moonlight_toy", "gbs=2", ("tp=1", "tp=2 pp=2", "pp=2")),
    (
        "deepseek_v3_toy",
        "gbs=4 numerics.data_shards=2 optimizer.use_distributed_optimizer=true",
        ("dp=1", "dp=2 tp=2", "dp=2 ep=2 mbs=2"),
    ),
    ("deepseek_v3_toy", "precision=fp32", ("tp=1", "tp=2")),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, model, fixed, layouts):
    agree(scenario(small(model), FIXED, fixed), layouts)


def test_stock_does_not(scenario):
    message = stock_differs(scenario(small("deepseek_v3_toy"), "iters=1"), ("tp=1", "tp=2"))
    assert "different at step 1" in message


def _heads_of_a_rank() -> None:
    import torch

    from tp_invariant_recipes.numerics.megatron.attention import latent_attention

    def backward(ctx, *gradients):
        total = gradients[0].sum(2, keepdim=True)
        if ctx.mesh.size > 1:
            torch.distributed.all_reduce(total, group=ctx.mesh.group)
        return total, None, None

    latent_attention._Spread.backward = staticmethod(backward)


# What is left out -> the parameters whose gradients then depend on tp first.
INGREDIENTS = {
    "products of chunks": product_per_rank,
    "the tree of the shared key's gradient": _heads_of_a_rank,
}


@pytest.mark.parametrize("omitted", INGREDIENTS)
def test_each_ingredient_is_needed(scenario, omitted):
    deepseek = scenario(small("deepseek_v3_toy"), FIXED)
    first, second = (deepseek(at).planted(INGREDIENTS[omitted]).ledger() for at in ("tp=1", "tp=2"))
    assert first[0].loss == second[0].loss  # the first forward pass is as it was
    assert unequal(first, second)
