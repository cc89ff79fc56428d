"""Gated delta nets: the default V, and what is refused beside the rows of refusals.py."""

import pytest

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.check import precision
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError

MODEL = "qwen3_next_toy"
PACKED = {
    "dataset___target_": "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
    "dataset__enable_offline_packing": True,
    "dataset__offline_packing_specs": {"packed_sequence_size": 512, "pad_seq_to_mult": 8},
}


def config_of(*overrides, device="gpu"):
    return compose(MODEL, ["model.mtp_num_layers=null", *overrides], device=device).config


def refused(*overrides, device="gpu") -> str:
    with pytest.raises(ConfigError) as error:
        config_of(*overrides, device=device)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize(
    "overrides, shards",
    (
        ((), 8),
        (("model.linear_num_key_heads=4",), 4),
    ),
)
def test_shards_divide_the_heads_of_keys(overrides, shards):
    assert config_of(*overrides).numerics.virtual_shards == shards


def test_packed_sequences_are_refused():
    message = "\n".join(limits_of(with_fields(config_of(), **PACKED)))
    assert "packed sequences in gated delta nets have no invariant version" in message
    assert "the sequences of a packed row come in another order than global_aux_loss counts them" in message


def test_cuda_graphs_need_the_loss_of_a_sequence():
    assert "global_aux_loss counts sequences where a captured layer cannot" in refused("cuda_graph=te")


def test_segments_in_fp8_are_whole_blocks():
    assert config_of("precision=fp8_tensorwise").numerics.virtual_shards > 1
    assert "the width of gated delta nets' alpha (model.linear_num_value_heads) is 16" in refused(
        "precision=fp8_blockwise"
    )
    sides = precision._sides(config_of("numerics=stock"))
    assert sides["the width of a gated delta net's in_proj / tp"] == 2 * (8 * 32 + 16 * 32 + 16)


def test_a_cpu_multiplies_whole_vectors():
    assert "on a CPU seq * model.num_attention_heads * model.kv_channels" in refused(
        "seq=8", "model.kv_channels=10", "model.num_moe_experts=32", "numerics.virtual_shards=8", device="cpu"
    )


@pytest.mark.parametrize(
    "override, says",
    (
        ("model.normalization=LayerNorm", "LayerNorm is covered for GPT models without multi-token prediction or lay"),
        ("model.position_embedding_type=learned_absolute", "learned positions are covered for GPT models"),
    ),
)
def test_what_only_plain_layers_have_is_refused(override, says):
    assert says in refused(override, "model.qk_layernorm=false")
