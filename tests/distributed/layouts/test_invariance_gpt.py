"""GPT as Megatron's defaults have it under `numerics=tree`: LayerNorm, learned positions, biases and GELU."""

import json

import pytest

from tests.distributed.scenario import STOCK, agree, stock_differs, unequal
from tp_invariant_recipes.ledger.bits import bits_float

MODEL = (
    "qwen3_toy seq=32 model.num_layers=1 model.normalization=LayerNorm model.qk_layernorm=false "
    "model.position_embedding_type=learned_absolute model.activation_func=torch.nn.functional.gelu "
    "model.gated_linear_unit=false model.add_bias_linear=true model.bias_activation_fusion=false"
)
SHARDS = "gbs=4 numerics.data_shards=4"

# What is held fixed, the layouts that must agree.
ROWS = (
    pytest.param("gbs=2 iters=2", ("tp=1", "tp=2 mbs=2"), marks=pytest.mark.release),
    pytest.param("gbs=1 iters=2", ("tp=1", "tp=4", "tp=2 sp=false"), marks=pytest.mark.release),
    pytest.param("gbs=2 iters=2 model.num_layers=2", ("tp=1", "pp=2", "tp=2 pp=2"), marks=pytest.mark.release),
    pytest.param(
        f"{SHARDS} iters=2",
        ("dp=1", "dp=2 mbs=2", "tp=2 dp=2 optimizer.use_distributed_optimizer=true"),
        marks=pytest.mark.release,
    ),
    pytest.param("gbs=1 iters=2 numerics.context_shards=2", ("cp=1", "cp=2", "tp=2 cp=2"), marks=pytest.mark.release),
    pytest.param(
        "gbs=1 iters=2 model.layernorm_zero_centered_gamma=true model.share_embeddings_and_output_weights=false",
        ("tp=1", "tp=2"),
        marks=pytest.mark.release,
    ),
    pytest.param("gbs=1 iters=2 precision=fp32", ("tp=1", "tp=2"), marks=pytest.mark.release),
    pytest.param(
        "gbs=1 iters=2 seq=128 model.kv_channels=32 numerics.virtual_shards=2 precision=fp8_tensorwise",
        ("tp=1", "tp=2"),
        marks=pytest.mark.release,
    ),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fixed, layouts", ROWS)
def test_one_ledger_for_all_layouts(scenario, fixed, layouts):
    agree(scenario(MODEL, fixed), layouts)


@pytest.mark.release
def test_stock_does_not(scenario):
    model = scenario(MODEL, "gbs=1 iters=1")
    assert "different at step 1" in stock_differs(model, ("tp=1", "tp=2"))
    actual, stock = (bits_float(item.ledger()[0].loss) for item in (model, model(STOCK)))
    assert actual == pytest.approx(stock, rel=1e-3)


# Every part of the model -> the override without it.
PARTS = {
    "means of rows": "model.normalization=RMSNorm",
    "positions": "model.position_embedding_type=rope",
    "exact GELU": "model.activation_func=megatron.core.activations.quick_gelu",
}


@pytest.mark.release
@pytest.mark.parametrize("part", PARTS)
def test_every_part_counts(scenario, part):
    model = scenario(MODEL, "gbs=1 iters=1")
    assert model.ledger()[0].loss != model(PARTS[part]).ledger()[0].loss


def _added_later() -> None:
    from tp_invariant_recipes.numerics.layers import norm

    norm.row_bias = lambda y, bias, mesh, sliced: y + bias


@pytest.mark.release
def test_a_norms_bias_needs_its_tree_sum(scenario):
    first, second = (scenario(MODEL, "gbs=2 iters=1", at).planted(_added_later).ledger() for at in ("tp=1", "tp=2"))
    assert first[0].loss == second[0].loss
    assert first[0].gradients != second[0].gradients
    assert unequal(first, second)


@pytest.mark.release
def test_padded_sequences_are_scored_and_longer_ones_refused(tpi):
    """Scoring pads to more tokens than there are learned positions."""
    tpi("train", *MODEL.split(), "gbs=1", "iters=1", "save=1", "run.dir=run", status=0)
    for name, length in (("fits", 32), ("longer", 33)):
        rows = [{"tokens": [*range(count)]} for count in (5, length)]
        (tpi.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for tp in (1, 2):
        tpi("score", "run", "fits.jsonl", f"tp={tp}", "--out", f"tp{tp}.scores", status=0)
    first, second = ((tpi.folder / f"tp{tp}.scores").read_bytes() for tp in (1, 2))
    assert first == second
    output = tpi("score", "run", "longer.jsonl", "--out", "longer.scores", status=2).stderr
    assert "a sequence has 33 tokens, and the model has learned 32 positions; leave longer ones out" in output


@pytest.mark.parametrize(
    "words, message",
    (
        ("numerics=portable", "LayerNorm is covered by numerics=tree only"),
        ("model.qk_layernorm=true", "of norms of queries and keys only RMSNorm is covered"),
        ("model.mtp_num_layers=1", "LayerNorm is covered for GPT models without multi-token prediction"),
        ("model.mtp_num_layers=1", "learned positions are covered for GPT models"),
        ("model.normalization=L2Norm", "of norms only RMSNorm and LayerNorm are covered"),
    ),
)
def test_what_is_refused(cli, words, message):
    ended = cli("train", *MODEL.split(), "device=cpu", "--dry-run", *words.split())
    assert ended.status == 2
    assert message in ended.err


@pytest.mark.release
def test_layers_without_positions_have_one_ledger(scenario):
    whole = scenario("qwen3_toy seq=32 gbs=2 iters=2")
    without_rope = whole("model.no_rope_freq=[0,1]")
    agree(without_rope, ("tp=1", "tp=2", "pp=2"))
    assert without_rope("tp=1").ledger()[0].loss not in (whole("tp=1").ledger()[0].loss, _of_the_other_layer(whole))


def _of_the_other_layer(whole) -> str:
    return whole("tp=1 model.no_rope_freq=[1,0]").ledger()[0].loss
