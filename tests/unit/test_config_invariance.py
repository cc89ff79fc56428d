"""What `numerics=tree` covers, and that everything else is refused before it starts, with the key to change."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import invariance
from tp_invariant_recipes.errors import ConfigError

TREE = compose("qwen3_toy", ["numerics=tree"], device="cpu").tree


def changed(**fields) -> dict:
    """The toy under numerics=tree with other fields, named section__field."""
    return with_fields(TREE, **fields)


def test_the_toy_is_covered_in_every_layout():
    for overrides in (["tp=8"], ["tp=4", "sp=false"], ["tp=2", "pp=2", "dp=2", "gbs=4"]):
        assert compose("qwen3_toy", ["numerics=tree", *overrides], device="cpu").tree["numerics"]["mode"] == "tree"


# What is changed, and what the line about it says after "numerics=tree: ".
BEYOND = (
    ({"model__use_mamba_mem_eff_path": False}, "Megatron's other path through a Mamba layer"),
    ({"model__normalization": "LayerNorm"}, "only model.normalization=RMSNorm"),
    ({"numerics__initial_weights": "megatron"}, "Megatron draws other weights"),
    ({"numerics__grad_norm": "fp64"}, "an fp64 sum still depends on its order"),
    ({"model__layernorm_zero_centered_gamma": True}, "zero-centred norm weights"),
    (
        {"model__add_bias_linear": True, "model__bias_activation_fusion": True, "model__gated_linear_unit": False},
        "a bias fused into an ungated activation",
    ),
    ({"ddp__delay_wgrad_compute": True}, "ddp.delay_wgrad_compute=true: norm weight gradients are complete only"),
    ({"ddp__grad_reduce_in_fp32": False}, "ddp.grad_reduce_in_fp32=false: gradients are accumulated in fp32"),
    ({"optimizer__optimizer": "muon"}, "optimizer.optimizer=muon: only adam and sgd"),
    ({"dist__use_sharp": True}, "dist.use_sharp=true: sums inside a switch"),
    ({"model__gtp_weight_remat_size": 2}, "weights spread over more ranks"),
    ({"model__position_embedding_type": "learned_absolute"}, "only rotary positions"),
    *(({f"model__{field}": True}, f"model.{field} is not covered") for field in invariance.OFF),
    ({"model__attention_backend": "flash"}, "of attention only auto, fused, unfused and local are covered"),
    ({"model__softmax_type": "learnable"}, "only the plain softmax"),
    ({"model__fp8": "hybrid"}, "FP8 and FP4 scales"),
    ({"model__tp_comm_overlap": True}, "overlapped collectives"),
    ({"model__delay_wgrad_compute": True}, "delayed weight gradients"),
    ({"model__cross_entropy_loss_fusion": True}, "the fused cross entropy"),
    ({"model__disable_bf16_reduced_precision_matmul": False}, "cuBLAS may add parts of a product in bf16"),
    ({"model__hidden_dropout": 0.1}, "dropout"),
    ({"model__attention_dropout": 0.1}, "dropout"),
    ({"model__cp_comm_type": "p2p"}, "of context parallelism only the exchange of heads keeps attention whole"),
    ({"dataset__dataloader_type": "cyclic"}, "which sequences a rank computes depends on dp"),
    ({"model__mtp_num_layers": 1}, "multi-token prediction"),
)


@pytest.mark.parametrize("fields, says", BEYOND, ids=[str(fields) for fields, _ in BEYOND])
def test_what_has_no_invariant_version_is_refused_under_tree_only(fields, says):
    (problem,) = invariance.limits(changed(**fields))
    assert problem.startswith(f"numerics=tree: {says}")
    assert invariance.limits(changed(**fields, numerics__mode="stock")) == []


@pytest.mark.parametrize("fields, says", BEYOND, ids=[str(fields) for fields, _ in BEYOND])
def test_gather_is_refused_the_same_but_takes_a_norm_in_fp64(fields, says):
    problems = invariance.limits(changed(**fields, numerics__mode="gather"))
    if "numerics__grad_norm" in fields:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"numerics=gather: {says}")


def test_all_that_is_beyond_is_said_at_once():
    everything = {name: value for fields, _ in BEYOND for name, value in fields.items()}
    found = invariance.limits(changed(**everything | {"parallel__data_parallel_size": 4}))
    said = {line.removeprefix("numerics=tree: ") for line in found}
    assert all(any(line.startswith(says) for line in said) for _, says in BEYOND)


def test_composing_says_it_beside_the_rest():
    with pytest.raises(ConfigError) as error:
        compose("qwen3_toy", ["numerics=tree", "numerics.virtual_shards=3", "pp=3"], device="cpu")
    assert "pp=3 does not divide" in str(error.value)
    assert "numerics.virtual_shards=3: must be a power of two" in str(error.value)


@pytest.mark.parametrize("shards", (None, 0, -2, 3, 6, 12, "8"))
def test_the_number_of_shards_is_a_power_of_two(shards):
    assert invariance.limits(changed(numerics__virtual_shards=shards)) == [
        f"numerics.virtual_shards={shards}: must be a power of two"
    ]


NUMBERS = st.sampled_from((4, 6, 8, 12, 16, 24, 48))
DIMENSIONS = st.fixed_dictionaries({f"model__{name}": NUMBERS for name in invariance.SHARDED})


@given(DIMENSIONS, st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((1, 2, 3, 4, 8, 16)))
def test_shards_divide_the_model_and_ranks_divide_shards(dimensions, shards, tp):
    fields = dimensions | {"model__tensor_model_parallel_size": tp, "device__kind": "gpu"}
    found = invariance.limits(changed(**fields, numerics__virtual_shards=shards))
    fits = all((number / shards).is_integer() for number in dimensions.values())
    assert bool(found) == (not fits or not (shards / tp).is_integer())
    if match := re.search(r"the largest that fits is numerics\.virtual_shards=(\d+)$", "\n".join(found)):
        again = invariance.limits(changed(**fields, numerics__virtual_shards=int(match[1])))
        assert not any(" does not divide model." in line or "power of two" in line for line in again)
    elif found:
        assert found == [
            f"tp={tp} does not divide numerics.virtual_shards={shards}; raise numerics.virtual_shards or change tp"
        ]


def test_a_cpu_wants_whole_vectors():
    says = "model.ffn_hidden_size=192: on a CPU it must be a multiple of 256"
    assert invariance.limits(changed(model__ffn_hidden_size=192)) == [says]
    assert invariance.limits(changed(model__ffn_hidden_size=192, device__kind="gpu")) == []


def test_precisions_that_scale_are_refused():
    tree = copy.deepcopy(TREE)
    assert invariance.limits(tree) == []
    for name, says in (("fp16_mixed", "only bf16_mixed is covered"), ("bf16_with_fp8_hybrid", "FP8 and FP4 scales")):
        tree["mixed_precision"] = name
        (problem,) = invariance.limits(tree)
        assert says in problem


def test_invariant_numerics_are_the_default_and_stock_is_asked_for():
    assert compose("qwen3_toy").tree["numerics"] == TREE["numerics"]
    assert compose("qwen3_toy", ["numerics=stock"]).tree["numerics"]["mode"] == "stock"
    assert compose("qwen3_toy", numerics="stock").tree["numerics"]["mode"] == "stock"
    assert compose("qwen3_toy", ["numerics=tree"], numerics="stock").tree == compose("qwen3_toy").tree


def refused(*overrides: str, model: str = "qwen3_toy") -> str:
    with pytest.raises(ConfigError) as error:
        compose(model, overrides, device="gpu")
    return str(error.value)


@pytest.mark.parametrize("model", ("qwen3_toy", "qwen3_moe_toy", "nemotron3_nano_toy"))
@pytest.mark.parametrize("override", ("precision=fp8_tensorwise", "model.mtp_num_layers=1"))
def test_what_is_not_covered_is_one_message_that_ends_with_stock(model, override):
    said = refused(override, model=model)
    assert said.startswith("numerics=tree: ") or said.splitlines()[1].startswith("  - numerics=tree: ")
    assert said.endswith("or numerics=stock")
    assert said.count("or numerics=stock") == 1


def test_several_limits_are_listed_and_the_way_out_is_said_once():
    assert refused("cuda_graph=full", "pp=2", "model.mtp_num_layers=1").splitlines() == [
        "2 problems in this configuration:",
        "  - numerics=tree: stages wait for each other where a captured step cannot; pp=1, or with numerics=tree "
        "cuda_graph=te",
        "  - numerics=tree: multi-token prediction is not covered yet; model.mtp_num_layers=null",
        "for the invariant numerics: change these, or numerics=stock",
    ]


@pytest.mark.parametrize("override", ("tp=3", "tp=0", "dp=0", "pp=-1"))
def test_what_stock_numerics_would_refuse_too_does_not_end_with_stock(override):
    assert "numerics" not in refused(override)


def test_a_field_of_the_model_that_no_rule_knows_is_refused_by_name():
    unknown = {"model__test_mode": True, "model__a_field_of_a_later_release": 1, "model__use_mup": None}
    assert invariance.limits(changed(**unknown)) == [
        f"numerics=tree: model.{name}: the invariant numerics do not know this field; leave it unset"
        for name in ("a_field_of_a_later_release", "test_mode", "use_mup")
    ]
    assert invariance.limits(changed(**unknown, numerics__mode="stock")) == []
