# SPDX-License-Identifier: Apache-2.0
"""What `numerics.adjust` sets right of a recipe: every row of the table, and that nothing else is touched."""

import pytest

from tests.rules import limits_of, table_problems
from tests.trees import with_fields
from tp_invariant_recipes.check import layout as layout_rules
from tp_invariant_recipes.check.invariant import invariance
from tp_invariant_recipes.config import adjusted
from tp_invariant_recipes.config.adjusted import ROWS, adjust
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.fingerprint import fingerprint
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import environment, run_config

TREE = compose("qwen3_moe_toy", ["cuda_graph=te"], device="gpu").config
WRONG = (True, False, "flex", "flash", "p2p", "optim_grads_params", "bfloat16", 2, "file")
_SFT = "megatron.bridge.data.builders.gpt_sft.GPTSFTDatasetConfig"
_PACKED = {"dataset___target_": _SFT, "dataset__enable_offline_packing": True}
_BIASED = {
    "model__add_bias_linear": True, "model__gated_linear_unit": False, "model__bias_activation_fusion": True,
    "model__num_moe_experts": None,
}  # fmt: skip
_ODD = {"model__num_layers": 7, "model__pipeline_model_parallel_size": 2}
_MUON = {"optimizer__optimizer": "muon", "optimizer__use_distributed_optimizer": False}
# What a row needs beside its field.
BESIDE = {
    "model.apply_rope_fusion": {"model__multi_latent_attention": True},
    "model.batch_p2p_comm": {"model__overlap_p2p_comm": True},
    "model.overlap_p2p_comm": {"model__virtual_pipeline_model_parallel_size": 2},
    "model.vocab_size": {"model__should_pad_vocab": True, "model__vocab_size": 1000},
    "model.cuda_graph_modules": {"model__cuda_graph_impl": "transformer_engine"},
    "model.cuda_graph_impl": {"model__pipeline_model_parallel_size": 2},
    "model.use_te_rng_tracker": {"device__kind": "cpu"},
    "rng.te_rng_tracker": {"device__kind": "cpu"},
    "optimizer.use_precision_aware_optimizer": {"optimizer__use_distributed_optimizer": False},
    "optimizer.exp_avg_dtype": {"optimizer__use_precision_aware_optimizer": False},
    "optimizer.exp_avg_sq_dtype": {"optimizer__use_precision_aware_optimizer": False},
    "ddp.overlap_param_gather": {"optimizer__use_distributed_optimizer": False},
    "optimizer.overlap_param_gather": {"optimizer__use_distributed_optimizer": False},
    "model.moe_router_bias_update_rate": {"model__moe_router_enable_expert_bias": True, "peft__dim": 8},
    "optimizer.muon_tp_mode": _MUON,
    "optimizer.use_layer_wise_distributed_optimizer": _MUON | {"optimizer__optimizer": "dist_muon"},
    "optimizer.optimizer": _MUON,
    "model.recompute_granularity": {"model__multi_latent_attention": True},
    "model.context_parallel_size": {"numerics__virtual_shards": 8, "model__tensor_model_parallel_size": 4},
    "numerics.context_shards": {"model__context_parallel_size": 8, "model__position_embedding_type": "yarn"},
    "dataset.offline_packing_specs.pad_seq_to_mult": _PACKED,
    "dataset.offline_packing_specs.pad_cu_seqlens": _PACKED,
    "dataset.dataset_kwargs": {"dataset___target_": _SFT},
    "checkpoint.async_strategy": {"checkpoint__async_save": True},
    "model.use_mamba_mem_eff_path": {"model__use_mamba_mem_eff_path": False},
    "model.activation_func": _BIASED,
    "model.bias_activation_fusion": _BIASED,
    "model.pipeline_model_parallel_layout": {"model__pipeline_model_parallel_size": 2},
    "model.num_layers_in_first_pipeline_stage": _ODD,
    "model.num_layers_in_last_pipeline_stage": _ODD,
    "model.expert_model_parallel_size": {"model__expert_tensor_parallel_size": 2},
}
VALUES = {
    "model.activation_func": ("torch.nn.functional.gelu",), "model.pipeline_model_parallel_layout": ("Et|t|tL",),
    "model.num_layers_in_first_pipeline_stage": (None,),
    "model.num_layers_in_last_pipeline_stage": (None,), "model.expert_model_parallel_size": (1,),
    "model.expert_tensor_parallel_size": (2,), "optimizer.muon_tp_mode": ("blockwise", "distributed"),
    "optimizer.use_layer_wise_distributed_optimizer": (False,), "optimizer.optimizer": ("dist_muon",),
    "ddp.num_distributed_optimizer_instances": (2,), "model.vocab_size": (1000,),
    "model.cuda_graph_modules": (["attn", "moe_preprocess"],), "model.cuda_graph_impl": ("full_iteration",),
    "dataset.dataset_kwargs": ({"get_attention_mask_from_fusion": False}, {"get_attention_mask_from_fusion": True}),
    "dataset.offline_packing_specs.pad_seq_to_mult": (1, 3, 64), "model.recompute_granularity": ("selective",),
    "model.recompute_modules": (["layernorm", "gdn_norm_out"],), "model.context_parallel_size": (8,),
    "numerics.context_shards": (8,), "mixed_precision.grad_reduce_in_fp32": (False,),
    "optimizer.main_params_dtype": ("bfloat16",), "model.moe_mlp_glu_interleave_size": (32,),
    "checkpoint.async_strategy": ("nvrx",), "checkpoint.ckpt_format": ("fsdp_dtensor", "torch"),
    "ddp.data_parallel_sharding_strategy": ("optim",),
    "cluster.environment.NCCL_ALGO": ("NVLS",),
    "model.moe_router_dtype": ("float32",), "ddp.suggested_communication_unit_size": (1,),
    "ddp.fsdp_all_gather_in_start_param_sync": (False,), "train.check_optimizer_step_success": (False,),
}  # fmt: skip
OF_CPUS = [variable.name for variable in environment.VARIABLES if variable.devices == ("cpu",)]
PATHS = [(row, path) for row in ROWS for path in row.paths]


def _with(path, value):
    """A run that has a value there, and what the row needs."""
    config = with_fields(TREE, **BESIDE.get(path, {}))
    if path.startswith(f"{adjusted.PRECISION}."):
        config = adjusted._set(config, [adjusted.PRECISION], {"bf16": True, "fp8": "hybrid" if "fp8" in path else None})
    if path.rpartition(".")[2] in OF_CPUS:
        config = with_fields(config, device__kind="cpu")
    return adjusted._set(config, path.split("."), value)


def _wrong(row, path):
    """A value that the row sets right; the run that has it."""
    for value in VALUES.get(path, WRONG):
        config = _with(path, value if "environment" not in path or path in VALUES else str(value))
        if row.wrong(config, adjusted._at(config.sections, path.split("."))):
            return config
    raise AssertionError(f"no value is wrong for {path}")


def _environment(config):
    return config.section("cluster").get("environment", {})


def test_a_row_adjusts_its_field_and_says_so():
    for row, path in PATHS:
        config = _wrong(row, path)
        done, lines = adjust(config, (), _environment(config), None)
        now = adjusted._at(done.sections, path.split("."))
        assert not row.wrong(done, now) or now is adjusted.NOT_SET, path
        messages = [line for line in lines if line.startswith(f"{path}: ")]
        assert messages, (path, lines)
        assert all(" -> " in line and line.rpartition(": ")[2] for line in messages), messages
        assert not [problem for problem in limits_of(done) if f" {path}=" in problem]


def test_what_the_command_line_sets_is_kept():
    for row, path in PATHS:
        config = _wrong(row, path)
        for typed in (path, path.rpartition(".")[0]):
            done, _ = adjust(config, (typed,), _environment(config), None)
            assert adjusted._at(done.sections, path.split(".")) == adjusted._at(config.sections, path.split(".")), path


def test_a_run_that_is_covered_stays_unchanged():
    assert adjust(TREE, (), {}, None) == (TREE, [])


def test_a_variable_of_the_cluster_is_none_of_the_recipe():
    config = _with("cluster.environment.NVTE_FWD_LAYERNORM_SM_MARGIN", "16")
    assert adjust(config, (), {"NVTE_FWD_LAYERNORM_SM_MARGIN": "20"}, None) == (config, [])


@pytest.mark.parametrize("shards, was, now", ((8, 1, 8), (8, 12, 24), (4, 16, 16), (1, 1, 2), (None, 1, 8)))
def test_packed_sequences_are_padded_to_the_next_multiple(shards, was, now):
    config = with_fields(_with("dataset.offline_packing_specs.pad_seq_to_mult", was), numerics__virtual_shards=shards)
    specs = adjust(config, (), {}, None)[0].section("dataset")["offline_packing_specs"]
    assert specs["pad_seq_to_mult"] == now


@pytest.mark.parametrize("beside, cp", (({}, 2), ({"model__position_embedding_type": "yarn"}, 1)))
def test_cp_is_as_large_as_it_is_covered_and_so_are_context_shards(beside, cp):
    fields = BESIDE["model.context_parallel_size"] | {"numerics__context_shards": 8} | beside
    config = with_fields(_with("model.context_parallel_size", 8), **fields)
    done, _ = adjust(config, (), {}, None)
    assert (done.model["context_parallel_size"], done.numerics.context_shards) == (cp, cp)
    typed, _ = adjust(config, ("numerics.context_shards",), {}, None)
    assert typed.numerics.context_shards == 8


@pytest.mark.parametrize(
    "layers, pp, message, ends",
    (
        (92, 8, {}, (10, 10)), (46, 4, {}, (11, 11)), (7, 2, {}, (4, 3)), (9, 8, {}, (2, 1)),
        (94, 4, {"virtual_pipeline_model_parallel_size": 2}, (24, 22)), (8, 4, {}, (None, None)),
        (7, 8, {}, (None, None)), (7, 4, {"account_for_embedding_in_pipeline_split": True}, (None, None)),
        (7, 2, {"pipeline_model_parallel_layout": "Etttt|tttL"}, (None, None)),
        (7, 2, {"num_layers_in_first_pipeline_stage": 2}, (2, None)),
    ),
)  # fmt: skip
def test_the_first_and_the_last_stage_have_other_layers_where_pp_does_not_divide_them(layers, pp, message, ends):
    beside = {f"model__{name}": value for name, value in message.items()}
    config = with_fields(TREE, model__num_layers=layers, model__pipeline_model_parallel_size=pp, **beside)
    done, _ = adjust(config, (), {}, None)
    assert tuple(done.model.get(name) for name in run_config.UNEVEN) == ends
    if ends[1]:
        assert not [problem for problem in table_problems(layout_rules, done) if "layers" in problem]


@pytest.mark.parametrize("experts, tp, ep, etp, now", ((8, 2, 4, 2, 8), (12, 2, 4, 2, 4), (8, 4, 1, 4, 4)))
def test_ranks_that_would_split_an_expert_share_whole_ones(experts, tp, ep, etp, now):
    config = with_fields(
        TREE, model__num_moe_experts=experts, model__tensor_model_parallel_size=tp,
        model__expert_model_parallel_size=ep, model__expert_tensor_parallel_size=etp,
    )  # fmt: skip
    done, _ = adjust(config, (), {}, None)
    assert (done.model["expert_model_parallel_size"], done.model["expert_tensor_parallel_size"]) == (now, 1)


def test_what_a_recipe_leaves_to_bridges_default_is_adjusted():
    examples = with_fields(TREE, dataset___target_=_SFT, dataset__dataset_kwargs=None, checkpoint__async_save=True)
    done, lines = adjust(examples, (), {}, None)
    assert done.section("dataset")["dataset_kwargs"] == {"pad_to_max_length": True}
    assert done.section("checkpoint")["async_strategy"] == "mcore"
    unset = adjusted._set(examples, ["dataset", "dataset_kwargs"], adjusted.NOT_SET)
    assert adjust(unset, (), {}, None)[0].section("dataset")["dataset_kwargs"] == {"pad_to_max_length": True}
    assert "dataset.dataset_kwargs" in "".join(lines)


def test_an_object_is_replaced_and_no_longer_kept():
    own = ["model.activation_func", "dataset.dataset_kwargs", "model.transformer_layer_spec"]
    config = with_fields(TREE, recipe__kept=["model.attention_backend", *own], **_BIASED, dataset___target_=_SFT)
    done, lines = adjust(config, (), {}, None)
    assert done.recipe.kept == own  # an object decides what is computed
    objects = [line for line in lines if "an object" in line]
    assert objects == ["model.attention_backend: an object -> auto: it has no invariant version"]
    assert not [path for path in own if any(line.startswith(f"{path}:") for line in lines)]


def test_a_precision_with_fp32_sums_has_its_name():
    config = _with("mixed_precision", {"bf16": True, "grad_reduce_in_fp32": False})
    assert adjust(config, (), {}, "bf16_mixed")[0].mixed_precision == "bf16_mixed"
    assert adjust(config, (), {}, None)[0].mixed_precision == {"bf16": True, "grad_reduce_in_fp32": True}


def test_of_mxfp8_what_the_products_do_without_is_adjusted():
    """A recipe's, not what is typed: that is refused (tests/unit/check/refusals.py)."""
    plain = {"bf16": True, "grad_reduce_in_fp32": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}
    others = ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp8_dot_product_attention")
    config = adjusted._set(TREE, ["mixed_precision"], plain | dict.fromkeys(others, True))
    done, lines = adjust(config, (), {}, None)
    assert done.mixed_precision == plain | dict.fromkeys(others, False)
    assert [line.partition(":")[0].removeprefix("mixed_precision.") for line in lines] == [*others]
    typed = f"mixed_precision.{others[2]}"
    assert adjust(config, (typed,), {}, None)[0].mixed_precision[others[2]] is True


def test_the_identity_has_what_is_trained():
    done, _ = adjust(_with("ddp.grad_reduce_in_fp32", False), (), {}, None)
    assert fingerprint(done, None) == fingerprint(TREE, None)


def test_stock_adjusts_nothing():
    stock = with_fields(compose("qwen3_toy", ["numerics=stock"]).config, numerics__adjust=False)
    assert table_problems(invariance, stock) == ["numerics.adjust=false: numerics=stock adjusts nothing; leave it out"]


def test_only_recipes_are_adjusted():
    with pytest.raises(ConfigError, match="qwen3_toy is no recipe"):
        compose("qwen3_toy", ["numerics.adjust=false"])
    with pytest.raises(ConfigError, match="gradients are accumulated in fp32"):
        compose("qwen3_toy", ["ddp.grad_reduce_in_fp32=false"])
