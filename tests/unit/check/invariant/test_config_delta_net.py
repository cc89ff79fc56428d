"""Gated delta nets: the default V, and what is refused beside the rows of refusals.py."""

import pytest

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose

MODEL = "qwen3_next_toy"
PACKED = {
    "dataset___target_": "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
    "dataset__enable_offline_packing": True,
    "dataset__offline_packing_specs": {"packed_sequence_size": 512, "pad_seq_to_mult": 8},
}


def config_of(*overrides):
    return compose(MODEL, ["model.mtp_num_layers=null", *overrides], device="gpu").config


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
