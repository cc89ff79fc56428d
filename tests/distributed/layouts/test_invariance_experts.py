"""Mixture-of-experts and hybrid models under `numerics=tree`: one ledger for every tp and ep, end to end."""

import pytest

from tests.distributed.faults import without
from tests.distributed.scenario import STOCK, agree, stock_differs
from tests.distributed.small_models import small
from tp_invariant_recipes.ledger.bits import bits_float

LATENT = "iters=2 model.moe_latent_size=32"  # of tokens that experts see
Z_LOSS = "model.moe_z_loss_coeff=0.01"
CAPACITY = "model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true"

# Model, what is held fixed, the layouts that must agree, with digests of all gradients and weights at every step. In
# `make test` test_expert_groups.py has a layout of qwen3_moe_toy.
GROUPS = (("nemotron3_nano_toy", "iters=2", ("tp=1", "tp=2 ep=2")),)
LONGER = (
    ("qwen3_moe_toy", "iters=2 gbs=2", ("tp=1", "tp=4 ep=2", "tp=2 pp=2")),
    ("qwen3_moe_toy", "iters=30", ("tp=1", "tp=2", "tp=4", "tp=4 ep=2")),
    ("qwen3_moe_toy", "iters=2 dp=2 gbs=4", ("tp=1", "tp=1 ep=2", "tp=2 ep=4")),
    ("qwen3_moe_toy", f"iters=2 mbs=2 gbs=4 precision=fp32 {CAPACITY}", ("tp=1", "tp=4 ep=4")),
    ("nemotron3_nano_toy", "iters=30", ("tp=1", "tp=2 ep=2", "tp=4")),
    ("nemotron3_nano_toy", f"iters=2 dp=2 gbs=4 {CAPACITY}", ("tp=1 ep=2", "tp=2")),
    ("nemotron3_nano_toy", LATENT, ("tp=1", "tp=2 ep=2", "pp=2")),
    ("nemotron3_nano_toy", f"{LATENT} gbs=4 numerics.data_shards=4", ("dp=1", "dp=2 ep=2", "dp=2 tp=2")),
    ("qwen3_moe_toy", LATENT, ("tp=1", "tp=4 ep=2")),
    ("qwen3_moe_toy", f"iters=2 gbs=2 {Z_LOSS}", ("tp=1", "tp=4 ep=2", "tp=2 pp=2 mbs=2")),
    ("qwen3_moe_toy", f"iters=2 gbs=4 numerics.data_shards=4 {Z_LOSS}", ("dp=1", "dp=2 ep=2 tp=2")),
    ("qwen3_moe_toy", f"iters=2 numerics.context_shards=2 seq=64 {Z_LOSS}", ("cp=1", "cp=2 ep=2")),
)
ROWS = (*GROUPS, *(pytest.param(*row, marks=pytest.mark.release) for row in LONGER))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model, fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, model, fixed, layouts):
    agree(scenario(small(model), fixed), layouts)


STOCK_LAYOUTS = (
    pytest.param("qwen3_moe_toy", "tp=2", marks=pytest.mark.release),
    ("nemotron3_nano_toy", "tp=2 ep=2"),
)


@pytest.mark.parametrize("model, layout", STOCK_LAYOUTS)
def test_stock_does_not(scenario, model, layout):
    message = stock_differs(scenario(small(model), "iters=1"), ("tp=1", layout))
    assert "different at step 1" in message


@pytest.mark.release
def test_stock_does_not_with_latents(scenario):
    stock_differs(scenario(small("nemotron3_nano_toy"), LATENT, "iters=1"), ("tp=1", "tp=2"))


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


REFUSED = {
    "numerics=gather": "experts are covered by numerics=tree and numerics=portable only",
    "tp=2 sp=false": "Megatron trains experts with tp=2 under sequence parallelism alone; sp=true",
    "tp=2 etp=2": "experts split over ranks have no invariant version; etp=1",
    "model.moe_router_load_balancing_type=sinkhorn": "model.moe_router_load_balancing_type one of aux_loss",
    "model.moe_latent_size=32 precision=fp8_tensorwise": "experts of latents have no invariant version in FP8",
    "numerics=portable model.moe_z_loss_coeff=0.1": "experts with model.moe_z_loss_coeff have no portable version",
    "model.moe_ffn_hidden_size=48": "on a CPU model.moe_ffn_hidden_size must be a multiple of 32",
    "seq=8": "seq / numerics.virtual_shards / numerics.context_shards * model.num_moe_experts must be a multiple of 32",
    "tp=4 model.num_moe_experts=6": "each expert needs one rank that computes it",
}


# The rules, one by one: tests/unit/check/invariant/test_config_experts.py.
@pytest.mark.parametrize(
    "override", [pytest.param(row, marks=[pytest.mark.release] * (n > 1)) for n, row in enumerate(REFUSED)]
)
def test_what_is_not_covered_is_refused(tpi, override):
    refused = tpi("train", *small("qwen3_moe_toy").split(), "numerics=tree", *override.split(), "run.dir=run", status=2)
    assert REFUSED[override] in refused.stderr
    assert not (tpi.folder / "run").exists()
