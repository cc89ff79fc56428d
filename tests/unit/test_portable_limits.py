"""What numerics=portable refuses, by name, before anything starts."""

import pytest

from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import invariance
from tp_invariant_recipes.errors import ConfigError

REFUSED = {
    "model.transformer_impl=transformer_engine": "model.transformer_impl=local",
    "precision=fp32": "precision=bf16",
    "precision=fp8_tensorwise": "FP8 and FP4 scales",
    "cp=2": "cp has no portable version; cp=1",
    "model.hidden_dropout=0.1": "dropout draws other numbers in every layout",
    "model.add_bias_linear=true": "biases of projections have no portable version",
    "model.rotary_interleaved=true": "of positions only rotary ones in halves",
    "optimizer.optimizer=sgd": "of optimizers only Adam has a portable version",
    "optimizer.use_precision_aware_optimizer=true": "Adam's moments are fp32",
    "numerics.grad_norm=fp64": "numerics.grad_norm=exact",
    "scheduler.lr_decay_style=inverse-square-root": "scheduler.lr_decay_style one of constant, linear, cosine",
}


def problems(model, *overrides, mode="portable"):
    try:
        compose(model, [f"numerics={mode}", *overrides], device="cpu")
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("override", REFUSED)
def test_what_has_no_portable_version_is_refused(override):
    found = problems("qwen3_toy", override)
    assert any(line.startswith("numerics=portable: ") and REFUSED[override] in line for line in found), found


@pytest.mark.parametrize("model", ("qwen3_toy", "qwen3_8b", "qwen3_moe_toy"))
def test_a_gpu_has_the_layers_and_the_optimizer_of_a_cpu(model):
    """Whatever device=gpu sets otherwise: Transformer Engine's have a library's arithmetic."""
    trees = [compose(model, ["numerics=portable"], device=device).tree for device in ("cpu", "gpu")]
    differing = {"distributed_backend", "kind"}
    for section in ("model", "optimizer", "ddp", "numerics"):
        first, second = (tree[section] for tree in trees)
        assert {name for name in {*first, *second} if first.get(name) != second.get(name)} <= differing, section


# Fields whose values Megatron-Bridge would have to be asked about.
FIELDS = (
    ({"model__activation_func": "torch.nn.functional.gelu"}, "of activations only SwiGLU has a portable version"),
    ({"model__gated_linear_unit": False}, "of activations only SwiGLU has a portable version"),
    ({"model__attention_backend": "unfused"}, "it has an attention of its own; model.attention_backend=auto"),
)


@pytest.mark.parametrize("changes, words", FIELDS, ids=lambda value: str(value)[:40])
def test_what_bridge_defines_is_refused_too(changes, words):
    tree = compose("qwen3_toy", ["numerics=portable"], device="cpu").tree
    assert not invariance.limits(tree)
    assert any(words in line for line in invariance.limits(with_fields(tree, **changes)))


OF_TREE = ("optimizer.optimizer=sgd", "precision=fp32", "optimizer.use_distributed_optimizer=true")


@pytest.mark.parametrize("override", OF_TREE)
def test_tree_takes_them(override):
    assert problems("qwen3_toy", override, mode="tree") == []


def test_mamba_is_refused():
    assert any("Mamba layers have no" in line for line in problems("nemotron3_nano_toy"))


EXPERTS = {
    "model.moe_router_score_function=sigmoid": "of routers only softmax has a portable version",
    **{
        f"model.{field}": f"experts with model.{field.partition('=')[0]} have no portable version"
        for field in (
            "moe_shared_expert_intermediate_size=64", "moe_expert_capacity_factor=1.0",
            "moe_router_enable_expert_bias=true", "moe_router_group_topk=2", "moe_router_num_groups=2",
            "moe_router_pre_softmax=true", "moe_router_topk_scaling_factor=2.5", "moe_router_dtype=fp32",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("override", EXPERTS)
def test_what_has_no_portable_version_of_experts_is_refused(override):
    found = problems("qwen3_moe_toy", override)
    assert any(line.startswith("numerics=portable: ") and EXPERTS[override] in line for line in found), found


def test_another_balancing_loss_is_refused():
    tree = compose("qwen3_moe_toy", ["numerics=portable"], device="cpu").tree
    assert not invariance.limits(tree)
    other = invariance.limits(with_fields(tree, model__moe_router_load_balancing_type="seq_aux_loss"))
    assert any("of balancing losses only aux_loss has a portable version" in line for line in other)


@pytest.mark.parametrize("override", ("model.moe_router_dtype=fp32", "model.moe_expert_capacity_factor=1.0"))
def test_tree_takes_them_of_experts(override):
    assert problems("qwen3_moe_toy", override, mode="tree") == []


def test_qwen3_with_experts_is_covered():
    for overrides in ((), ("tp=2",), ("tp=2", "ep=2"), ("pp=2",)):
        assert problems("qwen3_moe_toy", *overrides) == []


def test_dense_qwen3_is_covered():
    for overrides in ((), ("tp=4", "sp=false"), ("tp=2", "pp=2", "dp=2", "gbs=4")):
        assert problems("qwen3_toy", *overrides) == []
    assert problems("qwen3_0p6b", "tp=2") == []
