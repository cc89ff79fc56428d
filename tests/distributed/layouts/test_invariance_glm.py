"""GLM-4.5 under `numerics=tree`: dense layers before layers of experts, half-rotated heads, multi-token prediction."""

import pytest

from tests.distributed.scenario import agree, stock_differs
from tests.distributed.small_models import RECOMPUTED

MODEL = (
    "glm45_toy seq=32 model.hidden_size=64 model.ffn_hidden_size=256 model.moe_ffn_hidden_size=64 "
    "model.moe_shared_expert_intermediate_size=256 model.kv_channels=16 model.vocab_size=512 model.num_layers=2 "
    "model.moe_layer_freq=[0,1]"
)


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "fixed, layouts",
    (
        (
            "gbs=1 iters=2",
            ("tp=1", "tp=2 pp=2", *(f"{layout} {RECOMPUTED}" for layout in ("tp=1", "tp=2 pp=2", "tp=4 ep=2"))),
        ),
        ("gbs=1 iters=2 model.mtp_num_layers=null", ("tp=1", f"tp=2 {RECOMPUTED}")),
        ("gbs=4 numerics.data_shards=2 iters=2", ("dp=1", "dp=2 ep=2", f"dp=2 ep=2 pp=2 {RECOMPUTED}")),
    ),
)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(MODEL, fixed), layouts)


@pytest.mark.release
@pytest.mark.parametrize("how", ("", RECOMPUTED), ids=("kept", "recomputed"))
def test_stock_does_not(scenario, how):
    message = stock_differs(scenario(MODEL, "gbs=1 iters=1", how), ("tp=1", "tp=2"))
    assert "different at step 1" in message


@pytest.mark.release
def test_the_order_of_layers_counts(scenario):
    """The dense layer is where `model.moe_layer_freq` has it, under stock numerics too."""
    model = scenario(MODEL, "gbs=1 iters=1")
    names = {name for name in model.ledger()[0].gradients if name.startswith("decoder.layers.")}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.router.weight" in names
    stock = scenario(MODEL, "gbs=1 iters=1 numerics=stock numerics.initial_weights=invariant tp=1").ledger()
    assert {name for name in stock[0].gradients if name.startswith("decoder.layers.")} == names
