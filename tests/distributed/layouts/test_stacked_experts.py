"""One digest for a matrix of all experts of a layer: the same in every layout, and another for other numerics."""

import pytest

from tests.distributed.scenario import agree, stock_differs
from tests.distributed.small_models import small

STACKED = "iters=1 model.num_layers=1 ledger.experts=together"


@pytest.mark.release
def test_stacked_experts_have_one_digest_in_every_layout(scenario):
    runs = scenario(small("qwen3_moe_toy"), STACKED)
    agree(runs, ("tp=1", "tp=2 ep=2"))
    parameters = {parameter.name: parameter for parameter in runs("tp=1").header().parameters}
    assert parameters["decoder.layers.0.mlp.experts.*.linear_fc2.weight"].shape[0] == 8
    assert not [name for name in parameters if ".experts.0." in name]
    assert set(parameters) >= {"decoder.layers.0.mlp.router.weight", "embedding.word_embeddings.weight"}


@pytest.mark.release
def test_stacked_experts_of_stock_differ(scenario):
    stock_differs(scenario(small("qwen3_moe_toy"), STACKED), ("tp=1", "tp=2 ep=2"))
