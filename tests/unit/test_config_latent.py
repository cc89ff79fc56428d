"""What invariant multi-latent attention covers, and the sizes of models that have it."""

import pytest

from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import invariance, latent
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.sizing.size import ATTENTION, weights

TREE = compose("deepseek_v3_toy", ["numerics=tree"], device="cpu").tree


def changed(**fields) -> dict:
    return with_fields(TREE, **fields)


@pytest.mark.parametrize("model", ("deepseek_v3_toy", "moonlight_toy", "deepseek_v3", "moonlight_16b_a3b", "kimi_k2"))
@pytest.mark.parametrize("layout", (("tp=8", "dp=2", "ep=16", "gbs=2"), ("tp=1",)))
def test_the_models_are_covered(model, layout):
    layout = [word for word in layout if not (word == "ep=16" and model.endswith("toy"))]
    assert compose(model, ["numerics=tree", *layout], device="gpu").tree["numerics"]["mode"] == "tree"


def test_the_fused_rotation_is_for_other_attention():
    assert compose("deepseek_v3_toy", device="gpu").tree["model"]["apply_rope_fusion"] is False
    assert compose("qwen3_toy", device="gpu").tree["model"]["apply_rope_fusion"] is True


# What is changed, and what the line about it says after "numerics=tree: ".
BEYOND = (
    ({"model__multi_latent_attention": False}, "multi-latent attention is covered for MLAModelProvider with"),
    ({"model__tensor_model_parallel_size": 2, "model__num_moe_experts": None}, "multi-latent attention under tensor"),
    ({"numerics__context_shards": 2}, "multi-latent attention has no version with context shards"),
    ({"model__num_query_groups": 16}, "multi-latent attention has keys and values for every head"),
    ({"model__qk_layernorm": False}, "multi-latent attention is covered with its norms"),
    ({"model__add_qkv_bias": True}, "multi-latent attention with biases"),
    ({"model__apply_rope_fusion": True}, "the fused rotation of multi-latent attention"),
    ({"model__recompute_granularity": "selective"}, "recomputation of multi-latent attention was not shown"),
    ({"model__mtp_num_layers": 1}, "multi-token prediction is not covered"),
    ({"model__moe_shared_expert_overlap": True}, "model.moe_shared_expert_overlap is not covered"),
    ({"model__moe_shared_expert_gate": True}, "model.moe_shared_expert_gate is not covered"),
    *(({f"model__{field}": True}, f"model.{field} is not covered") for field in latent.OFF),
)


@pytest.mark.parametrize("fields, says", BEYOND, ids=[str(fields) for fields, _ in BEYOND])
def test_what_has_no_invariant_version_is_refused_under_tree_only(fields, says):
    (problem,) = invariance.limits(changed(**fields))
    assert problem.startswith(f"numerics=tree: {says}")
    assert invariance.limits(changed(**fields, numerics__mode="stock")) == []


@pytest.mark.parametrize("mode", ("gather", "portable"))
def test_other_modes_refuse_it(mode):
    assert f"numerics={mode}: multi-latent attention is covered by numerics=tree only" in invariance.limits(
        changed(numerics__mode=mode)
    )


def test_the_field_alone_does_not_make_another_provider_have_it():
    of_gpt = {"model___target_": schema.PROVIDERS[0], "model__moe_layer_freq": 1}
    (problem,) = invariance.limits(changed(**of_gpt))
    assert problem.startswith("numerics=tree: multi-latent attention is covered for MLAModelProvider")


def test_the_weights_of_its_projections():
    """DeepSeek-V3's: two down-projections whole on every rank, two up-projections and the output divided."""
    found = weights(compose("deepseek_v3", device="gpu").tree["model"], ATTENTION)
    assert found.whole == 7168 * (1536 + 512 + 64) + 7168 + 1536 + 512
    assert found.split == 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168


@pytest.mark.parametrize("frequency, refused", ((2, True), ([0, 1, 1, 1], True), ([1, 1, 1, 1], False), (1, False)))
def test_dense_layers_are_refused_where_bridge_would_make_none(frequency, refused):
    tree = with_fields(compose("qwen3_moe_toy", device="cpu").tree, model__moe_layer_freq=frequency)
    says = "numerics=tree: Bridge's GPTModelProvider makes every layer one of experts"
    assert [problem.startswith(says) for problem in invariance.limits(tree)] == [True] * refused
    assert invariance.limits(changed(model__moe_layer_freq=[0, 1, 1, 1])) == []
