"""Recipes of Bridge with multi-latent attention, sinks or gated delta nets compose for `tree` and train."""

import pytest

from tests.distributed.recipes.families import FAMILIES, SHORT, folder
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.ledger.open import read

pytestmark = pytest.mark.usefixtures("families")

LAYOUT = ("tp=2", "sp=true", "pp=1", "ep=2")
_COVERED = (
    "precision=bf16 cuda_graph=off model.moe_token_dispatcher_type=alltoall model.moe_router_fusion=false "
    "model.moe_shared_expert_overlap=false optimizer.main_grads_dtype=float32 "
    "optimizer.use_precision_aware_optimizer=false comm_overlap.tp_comm_overlap=false "
    "comm_overlap.overlap_grad_reduce=null comm_overlap.overlap_param_gather=null "
    "comm_overlap.align_param_gather=null comm_overlap.delay_wgrad_compute=false "
    "comm_overlap.overlap_moe_expert_parallel_comm=false"
)


# Family -> overrides beside its recipe, and some of the model that it composes.
COMPOSED = (
    ("moonlight", _COVERED, {"multi_latent_attention": True, "moe_layer_freq": [0, 1]}),
    ("deepseek", _COVERED, {"multi_latent_attention": True, "moe_layer_freq": [0, 1], "q_lora_rank": 32}),
    (
        "deepseek",
        f"{_COVERED} model.mtp_num_layers=null",
        {"multi_latent_attention": True, "moe_layer_freq": [0, 1], "q_lora_rank": 32},
    ),
    ("deepseek_v2", f"{_COVERED} etp=1", {"multi_latent_attention": True, "moe_layer_freq": [0, 1]}),
    ("gpt_oss", "", {"softmax_type": "learnable", "activation_func_clamp_value": 7.0}),
    ("qwen3_next", "", {"linear_attention_freq": [1, 0], "moe_router_load_balancing_type": "global_aux_loss"}),
)


@pytest.mark.parametrize(
    "family, more, fields",
    [pytest.param(*row, marks=[] if n in (1, 4, 5) else pytest.mark.release) for n, row in enumerate(COMPOSED)],
)
def test_a_recipe_composes_for_tree(bridge, tmp_path, family, more, fields):
    recipe = f"recipe={FAMILIES[family][0]}"
    words = [f"recipe.hf_folder={folder(tmp_path, family)}", *SHORT.split(), *LAYOUT, *more.split()]
    tree = compose(recipe, words, device="cpu").config.sections
    assert (tree["numerics"]["mode"], tree["recipe"]["kept"]) == ("tree", [])  # with layers of tpi's
    assert {name: tree["model"][name] for name in fields} == fields
    assert tree["model"].get("q_lora_rank") == FAMILIES[family][1].get("q_lora_rank")


# Families: their recipes are cut in size and in steps, and in nothing else.
CUT_SMALL = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "gpt_oss", "nemotron_super", "qwen3_next")
CUT = "seq=64 gbs=2 iters=3 scheduler.lr_warmup_iters=0 tp=1 pp=1 ep=1 device=cpu"


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CUT_SMALL)
def test_a_recipe_trains_without_another_key_than_size(shared, family):
    words = (f"recipe={FAMILIES[family][0]}", f"recipe.hf_folder={folder(shared.folder / 'hf', family)}", *CUT.split())
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
    place = folder(shared.folder / "hf", "qwen3_moe")
    words = (f"recipe={BENCHMARK}", f"recipe.hf_folder={place}", *CUT_BENCHMARK.split(), "tp=1,2")
    done = shared("verify", *words, "--dir", "benchmark", status=0)
    assert "identical: tp=1, 2 are bitwise identical over 2 steps" in done.stdout
    adjusted = read(shared.folder / "benchmark" / "tp1").header.notes["adjusted"]
    for line in ADJUSTED:
        assert any(message.startswith(line) for message in adjusted), adjusted
    done = shared("verify", *words, *AS_STOCK.split(), "--dir", "benchmark-stock", status=1)
    assert "different: tp=2 is not bitwise identical to tp=1" in done.stdout
