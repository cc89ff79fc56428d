"""Recipes of Bridge with multi-latent attention or sinks compose for `tree`; what is missing is named."""

import json

import pytest

from tests.distributed.recipes.test_recipe_models import _CLASSES, SHORT, SIZES
from tests.distributed.recipes.test_recipe_models import FAMILIES as OTHERS
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.ledger.open import read

pytestmark = pytest.mark.usefixtures("families")

_LATENT = SIZES | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "tie_word_embeddings": False,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 512,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
_SUPER = {  # experts of latents, and multi-token prediction
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*E",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "vocab_size": 512,
}
_QWEN3_NEXT = SIZES | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "head_dim": 16,
}
# A family: the recipe of Bridge and the config.json cut small.
FAMILIES = {
    "moonlight": (
        "moonlight_16b_pretrain_config",
        _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    ),
    "deepseek": (
        "deepseek_v3_pretrain_config",
        _LATENT | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1},
    ),
    "deepseek_v2": (
        "deepseek_v2_lite_pretrain_config",
        _LATENT
        | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        | {"q_lora_rank": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
    ),
    "gpt_oss": ("gpt_oss_20b_pretrain_config", _GPT_OSS),
    "qwen3_next": ("qwen3_next_80b_a3b_pretrain_config", _QWEN3_NEXT),
    "nemotron_super": ("nemotron_3_super_pretrain_16gpu_h100_bf16_config", _SUPER),
}
LAYOUT = ("tp=2", "sp=true", "pp=1", "ep=2")
_COVERED = (
    "precision=bf16 cuda_graph=off model.moe_token_dispatcher_type=alltoall model.moe_router_fusion=false "
    "model.moe_shared_expert_overlap=false optimizer.main_grads_dtype=float32 "
    "optimizer.use_precision_aware_optimizer=false comm_overlap.tp_comm_overlap=false "
    "comm_overlap.overlap_grad_reduce=null comm_overlap.overlap_param_gather=null "
    "comm_overlap.align_param_gather=null comm_overlap.delay_wgrad_compute=false "
    "comm_overlap.overlap_moe_expert_parallel_comm=false"
)
# A family: what is chosen beside its recipe, and words of the one message that refuses this.
MISSING = {
    "gpt_oss": (
        ["numerics=portable"],
        (
            "attention sinks have no portable version; model.softmax_type=vanilla",
            "model.activation_func_clamp_value have no portable version",
            "model.glu_linear_offset have no portable version",
            "windows of attention have no portable version",
            "YaRN has no portable version",
            "of activations only SwiGLU has a portable version",
            "biases of projections have no portable version",
            "or numerics=stock",
        ),
    ),
}


@pytest.fixture(scope="module")
def hugging_face(shared):
    for family, (_, config) in FAMILIES.items():
        folder = shared.folder / "hf" / family
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    return shared.folder / "hf"


def composed(family, folder, *more):
    return compose(
        f"recipe={FAMILIES[family][0]}",
        [f"recipe.hf_folder={folder / family}", *SHORT.split(), *LAYOUT, *more],
        device="cpu",
    ).config.sections


@pytest.mark.parametrize(
    "family, more",
    (
        ("moonlight", ()),
        ("deepseek", ()),
        ("deepseek", ("model.mtp_num_layers=null",)),
        ("deepseek_v2", ("etp=1",)),
    ),
)
def test_a_recipe_with_latent_attention_composes_for_tree(bridge, hugging_face, family, more):
    tree = composed(family, hugging_face, *_COVERED.split(), *more)
    assert tree["recipe"]["kept"] == []  # its layers are those of megatron/latent_spec.py
    assert tree["model"]["multi_latent_attention"] is True
    assert tree["model"]["moe_layer_freq"] == [0, 1]
    assert tree["model"].get("q_lora_rank") == FAMILIES[family][1]["q_lora_rank"]


def test_a_recipe_with_sinks_composes_for_tree(bridge, hugging_face):
    tree = composed("gpt_oss", hugging_face)
    assert (tree["numerics"]["mode"], tree["recipe"]["kept"]) == ("tree", [])
    assert tree["model"]["softmax_type"] == "learnable"
    assert tree["model"]["activation_func_clamp_value"] == 7.0


def test_a_recipe_with_gated_delta_nets_composes_for_tree(bridge, hugging_face):
    tree = composed("qwen3_next", hugging_face)
    assert (tree["numerics"]["mode"], tree["recipe"]["kept"]) == ("tree", [])
    assert tree["model"]["linear_attention_freq"] == [1, 0]
    assert tree["model"]["moe_router_load_balancing_type"] == "global_aux_loss"


@pytest.mark.parametrize("family", MISSING)
def test_what_is_missing_is_named_in_one_message(bridge, hugging_face, family):
    chosen, message = MISSING[family]
    with pytest.raises(ConfigError) as caught:
        composed(family, hugging_face, *chosen)
    for words in message:
        assert words in str(caught.value)


# Families: their recipes are cut in size and in steps, and in nothing else.
CUT_SMALL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "gpt_oss", "nemotron_super", "qwen3_next")
CUT = "seq=64 gbs=2 iters=3 scheduler.lr_warmup_iters=0 tp=1 pp=1 ep=1 device=cpu"


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CUT_SMALL)
def test_a_recipe_trains_without_another_key_than_size(shared, family):
    if family in FAMILIES:
        recipe, config = FAMILIES[family]
    else:
        recipe, own, _ = OTHERS[family]
        config = SIZES | {"model_type": family, "architectures": [f"{_CLASSES[family]}ForCausalLM"]} | own
    folder = shared.folder / "cut" / family
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = (f"recipe={recipe}", f"recipe.hf_folder={folder}", *CUT.split())
    done = shared("train", *words, f"run.dir={family}-cut", status=0)
    assert "adjusted, numerics.adjust=false refuses it:" in done.stderr
    assert "3 steps, numerics=tree" in done.stderr
    assert len(shared.ledger(f"{family}-cut")) == 3


# A benchmark of Bridge's: room for an expert rank's tokens, the flex dispatcher; MXFP8, which stock lacks.
BENCHMARK = "megatron.bridge.perf_recipes.qwen:qwen3_30b_a3b_pretrain_8gpu_b200_fp8mx_config"
CUT_BENCHMARK = "seq=64 gbs=4 mbs=1 iters=2 scheduler.lr_warmup_iters=0 pp=1 ep=1 device=cpu dataset.num_workers=0"
# What stock numerics need of it on a CPU: the same, typed.
AS_STOCK = (
    "precision=bf16 numerics=stock numerics.initial_weights=invariant cuda_graph=off "
    "comm_overlap.overlap_moe_expert_parallel_comm=null comm_overlap.delay_wgrad_compute=null "
    "model.overlap_moe_expert_parallel_comm=false model.delay_wgrad_compute=false "
    "model.tp_comm_overlap=false comm_overlap.tp_comm_overlap=false "
    "model.moe_paged_stash=false model.moe_expert_rank_capacity_factor=null model.moe_token_dispatcher_type=alltoall "
    "model.use_transformer_engine_op_fuser=false model.moe_router_fusion=false model.use_te_rng_tracker=false "
    "rng.te_rng_tracker=false model.moe_mlp_glu_interleave_size=null model.moe_router_padding_for_quantization=false"
)
ADJUSTED = (
    "model.moe_paged_stash: true -> false: ",
    "model.moe_expert_rank_capacity_factor: 1.5 -> null: ",
    "mixed_precision.fp8_dot_product_attention: true -> false: ",
)


@pytest.mark.release
@pytest.mark.timeout(600)
def test_a_benchmark_has_one_result_in_two_layouts_and_stock_has_not(shared):
    _, own, _ = OTHERS["qwen3_moe"]
    config = SIZES | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]} | own
    folder = shared.folder / "cut" / "benchmark"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = (f"recipe={BENCHMARK}", f"recipe.hf_folder={folder}", *CUT_BENCHMARK.split(), "tp=1,2")
    done = shared("verify", *words, "--dir", "benchmark", status=0)
    assert "identical: tp=1, 2 computed the same bits over 2 steps" in done.stdout
    adjusted = read(shared.folder / "benchmark" / "tp1").header.notes["adjusted"]
    for line in ADJUSTED:
        assert any(message.startswith(line) for message in adjusted), adjusted
    done = shared("verify", *words, *AS_STOCK.split(), "--dir", "benchmark-stock", status=1)
    assert "different: tp=2 computed other bits than tp=1" in done.stdout
