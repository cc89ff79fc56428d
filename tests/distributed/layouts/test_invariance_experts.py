"""Mixture-of-experts and hybrid models under `numerics=tree`: one ledger for tp and ep. More rows: families.py."""

import pytest

from tests.distributed.faults import without
from tests.distributed.scenario import STOCK, agree, stock_differs
from tests.distributed.small_models import small
from tp_invariant_recipes.ledger.bits import bits_float

HYBRID = f"{small('nemotron3_nano_toy')} iters=1 model.hybrid_layer_pattern=ME*"
LAYOUTS = ("tp=1", "tp=2 ep=2")


def test_one_ledger_for_all_layouts(scenario):
    agree(scenario(HYBRID), LAYOUTS)


def test_stock_does_not(scenario):
    assert "different at step 1" in stock_differs(scenario(HYBRID), LAYOUTS)


@pytest.mark.release
def test_the_norm_of_experts_and_all_else_is_one(scenario):
    """Left to Megatron it is put together of two rounded ones: those of experts, and of all else."""
    single = scenario(small("qwen3_moe_toy"), "iters=5 tp=1")
    whole, chained = single.ledger(), single.planted(without("ChainedOptimizer.get_grad_norm")).ledger()
    assert whole[0].gradients == chained[0].gradients
    assert [step.grad_norm for step in whole] != [step.grad_norm for step in chained]


@pytest.mark.release
def test_the_z_loss_counts_as_it_does_in_stock(scenario):
    """Its gradient is most of the router's where its coefficient is large."""
    model, large = scenario(small("qwen3_moe_toy"), "iters=1 precision=fp32"), "model.moe_z_loss_coeff=100"
    actual, stock, without = (bits_float(model(*more).ledger()[0].grad_norm) for more in ((large,), (large, STOCK), ()))
    assert actual == pytest.approx(stock, rel=1e-5)
    assert actual > 2 * without
