# SPDX-License-Identifier: Apache-2.0
"""What is covered of a model, beside the rows of refusals.py: gated delta nets, latents, experts, packed rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.check.invariant import shards
from tp_invariant_recipes.check.invariant.training import PACKED_LIMITS as LIMITS
from tp_invariant_recipes.check.invariant.training import PADDED, uneven
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.run_config import RunConfig

MODEL = "qwen3_next_toy"
PACKED = {
    "dataset___target_": "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig",
    "dataset__enable_offline_packing": True,
    "dataset__offline_packing_specs": {"packed_sequence_size": 512, "pad_seq_to_mult": 8},
}


def config_of(*overrides):
    return compose(MODEL, ["model.mtp_num_layers=null", *overrides], device="gpu").config


@pytest.mark.parametrize("overrides, shards", (((), 8), (("model.linear_num_key_heads=4",), 4)))
def test_shards_divide_the_heads_of_keys(overrides, shards):
    assert config_of(*overrides).numerics.virtual_shards == shards


def test_packed_sequences_are_refused():
    message = "\n".join(limits_of(with_fields(config_of(), **PACKED)))
    assert "packed sequences in gated delta nets have no invariant version" in message
    assert "the sequences of a packed row come in another order than global_aux_loss counts them" in message


TREE = compose("deepseek_v3_toy", ["numerics=tree"], device="cpu").config


def test_the_fused_rotation_is_for_other_attention():
    assert compose("deepseek_v3_toy", device="gpu").config.model["apply_rope_fusion"] is False
    assert compose("qwen3_toy", device="gpu").config.model["apply_rope_fusion"] is True


def test_the_field_alone_does_not_make_another_provider_have_it():
    of_gpt = {"model___target_": schema.PROVIDERS[0], "model__moe_layer_freq": 1}
    (problem,) = limits_of(with_fields(TREE, **of_gpt))
    assert problem.startswith("numerics=tree: multi-latent attention is covered for MLAModelProvider")


@given(
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=len(shards.SHARDED)),
    others=st.sampled_from(("abc", None)),
)
def test_v_where_none_is_given(sizes, others):
    model = dict.fromkeys(shards.SHARDED, others) | dict(zip(shards.SHARDED, sizes, strict=False))
    count = shards.default_shards(RunConfig({"model": model, "device": {"kind": "gpu"}}))
    assert count in (1, 2, 4, 8)
    assert all(size % count == 0 for size in sizes)
    assert count == 8 or math.gcd(*sizes) % (2 * count)


@pytest.mark.parametrize("model, shards", (("qwen3_8b", 8), ("qwen3_30b_a3b", 4), ("nemotron3_nano", 2)))
def test_v_of_the_models_is_the_same_in_every_layout(model, shards):
    for layout in (["tp=1"], ["tp=2"], ["tp=2", "dp=2", "gbs=2"]):
        assert compose(model, ["numerics=tree", *layout], device="gpu").config.numerics.virtual_shards == shards
    given = compose(model, ["numerics=tree", "numerics.virtual_shards=2"], device="gpu").config.section("numerics")[
        "virtual_shards"
    ]
    assert given == 2


@pytest.mark.parametrize("shards, multiple, refused", ((1, 1, True), (1, 2, False), (4, 6, True), (4, 8, False)))
def test_each_packed_sequence_has_a_multiple_of_the_shards_and_at_least_two_tokens(shards, multiple, refused):
    config = compose("qwen3_toy", [f"numerics.virtual_shards={shards}"], device="cpu").config
    assert uneven(config, {"pad_seq_to_mult": multiple}) is refused


@pytest.mark.parametrize(
    "words, multiple, fits",
    (("", 6, 24), ("numerics.virtual_shards=4", None, 4), ("precision=fp8_tensorwise", 64, 128)),
)
def test_the_message_names_the_value_and_one_that_fits(words, multiple, fits):
    config = compose("qwen3_toy", [*words.split(), "seq=1024"], device="cpu").config
    specs = {"packed_sequence_size": 1024, "pad_seq_to_mult": multiple}
    config = with_fields(config, **PACKED | {"dataset__offline_packing_specs": specs})
    (problem,) = (p for p in broken_rules(config, LIMITS) if PADDED in p.key)
    assert problem.key == f"numerics=tree: {PADDED}={'null' if multiple is None else multiple}"
    assert problem.solve == f"{PADDED}={fits}"
