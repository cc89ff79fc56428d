"""What invariant multi-latent attention covers, and the sizes of models that have it."""

import pytest

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.sizing.size import ATTENTION, weights

TREE = compose("deepseek_v3_toy", ["numerics=tree"], device="cpu").config


@pytest.mark.parametrize("model", ("deepseek_v3", "moonlight_16b_a3b", "kimi_k2"))
def test_the_models_are_covered(model):
    layout = ("tp=8", "dp=2", "ep=16", "gbs=2")
    assert compose(model, ["numerics=tree", *layout], device="gpu").config.numerics.mode == "tree"


def test_the_fused_rotation_is_for_other_attention():
    assert compose("deepseek_v3_toy", device="gpu").config.model["apply_rope_fusion"] is False
    assert compose("qwen3_toy", device="gpu").config.model["apply_rope_fusion"] is True


def test_the_field_alone_does_not_make_another_provider_have_it():
    of_gpt = {"model___target_": schema.PROVIDERS[0], "model__moe_layer_freq": 1}
    (problem,) = limits_of(with_fields(TREE, **of_gpt))
    assert problem.startswith("numerics=tree: multi-latent attention is covered for MLAModelProvider")


def test_the_weights_of_its_projections():
    """DeepSeek-V3's: two down-projections whole on every rank, two up-projections and the output divided."""
    result = weights(compose("deepseek_v3", device="gpu").config.shape, ATTENTION)
    assert result.whole == 7168 * (1536 + 512 + 64) + 7168 + 1536 + 512
    assert result.split == 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
