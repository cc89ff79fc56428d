"""What the invariant experts cover, and V where none is given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import experts, invariance

TREE = compose("qwen3_moe_toy", ["numerics=tree"], device="cpu").tree


def changed(**fields) -> dict:
    return with_fields(TREE, **fields)


@pytest.mark.parametrize("model", ("qwen3_moe_toy", "qwen3_30b_a3b", "nemotron3_nano_toy", "nemotron3_nano"))
@pytest.mark.parametrize("layout", (("tp=1",), ("tp=2",), ("tp=2", "ep=2"), ("tp=1", "dp=2", "ep=2", "gbs=2")))
def test_the_recipes_are_covered(model, layout):
    assert compose(model, ["numerics=tree", *layout], device="gpu").tree["numerics"]["mode"] == "tree"


# What is changed, and what the line about it says after "numerics=tree: ".
BEYOND = (
    ({"model__expert_tensor_parallel_size": 2}, "experts split over ranks"),
    ({"model__tensor_model_parallel_size": 2}, "experts under tensor parallelism need sequence parallelism"),
    ({"model__expert_model_parallel_size": 3}, "each expert needs one rank that computes it"),
    ({"model__num_moe_experts": 12, "model__expert_model_parallel_size": 8}, "each expert needs one rank"),
    ({"model__moe_ffn_hidden_size": 48}, "on a CPU model.moe_ffn_hidden_size must be a multiple of 32"),
    (
        {"model__num_moe_experts": 1, "model__seq_length": 64},
        "on a CPU seq / numerics.virtual_shards / numerics.context_shards * model.num_moe_experts",
    ),
    ({"model__activation_func": "torch.nn.functional.gelu"}, "of the experts' activations"),
    ({"model__gated_linear_unit": False}, "of the experts' activations"),
    ({"model__moe_router_load_balancing_type": "sinkhorn"}, "other sums stand in the router"),
    ({"model__moe_router_load_balancing_type": ["aux_loss"]}, "other sums stand in the router"),
    ({"model__moe_router_dtype": "fp64"}, "only model.moe_router_dtype=fp32 or null"),
    ({"model__moe_token_dispatcher_type": "flex"}, "the flex dispatcher"),
    ({"model__add_bias_linear": True}, "experts with biases"),
    *(({f"model__{field}": 1}, f"model.{field} is not covered") for field in experts.OFF),
)


@pytest.mark.parametrize("fields, says", BEYOND, ids=[str(fields) for fields, _ in BEYOND])
def test_what_has_no_invariant_version_is_refused_under_tree_only(fields, says):
    (problem,) = invariance.limits(changed(**fields))
    assert problem.startswith(f"numerics=tree: {says}")
    assert invariance.limits(changed(**fields, numerics__mode="stock")) == []
    assert invariance.limits(changed(**(fields | {"model__num_moe_experts": None}))) == []


def test_what_says_how_experts_are_computed_has_a_value_that_is_covered():
    for field in experts.HOW:
        (problem,) = invariance.limits(changed(**{f"model__{field}": True}))
        assert problem.endswith(f"; model.{field}=false")
        assert invariance.limits(changed(**{f"model__{field}": False})) == []


def test_shared_experts_on_a_cpu_are_whole_vectors():
    """As every width that is divided among ranks and followed by an activation."""
    (problem,) = invariance.limits(changed(model__moe_shared_expert_intermediate_size=64))
    assert problem == "model.moe_shared_expert_intermediate_size=64: on a CPU it must be a multiple of 128"
    assert invariance.limits(changed(model__moe_shared_expert_intermediate_size=128)) == []


def test_gather_has_no_experts():
    assert "numerics=gather: experts are covered by numerics=tree and portable only" in invariance.limits(
        changed(numerics__mode="gather")
    )


@given(
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=len(invariance.SHARDED)),
    others=st.sampled_from(("abc", None, True)),
)
def test_v_where_none_is_given(sizes, others):
    model = dict.fromkeys(invariance.SHARDED, others) | dict(zip(invariance.SHARDED, sizes, strict=False))
    shards = invariance.default_shards({name: None if size is True else size for name, size in model.items()})
    assert shards in (1, 2, 4, 8)
    assert all(size % shards == 0 for size in sizes)
    assert shards == 8 or math.gcd(*sizes) % (2 * shards)


@pytest.mark.parametrize("model, shards", (("qwen3_8b", 8), ("qwen3_30b_a3b", 4), ("nemotron3_nano", 2)))
def test_v_of_the_models_is_the_same_in_every_layout(model, shards):
    for layout in (["tp=1"], ["tp=2"], ["tp=2", "dp=2", "gbs=2"]):
        assert compose(model, ["numerics=tree", *layout], device="gpu").tree["numerics"]["virtual_shards"] == shards
    given = compose(model, ["numerics=tree", "numerics.virtual_shards=2"], device="gpu").tree["numerics"][
        "virtual_shards"
    ]
    assert given == 2
