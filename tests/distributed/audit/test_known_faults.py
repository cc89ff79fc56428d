# SPDX-License-Identifier: Apache-2.0
"""Known faults of Megatron: which runs they strike, and that a patch which is on mends them."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.patches import faults, registry


def configured(words: str):
    model, *overrides = words.split()
    return compose(model, ["numerics=stock", *overrides], device="cpu").config


pytestmark = pytest.mark.usefixtures("bridge", "here")
EXPERTS = "qwen3_moe_toy gbs=4 tp=2"
# Words of a run, the fault that strikes it without its patch, a neighbour that it does not strike.
SHARDED = "dp=2 gbs=4 ddp.use_megatron_fsdp=true ddp.data_parallel_sharding_strategy=optim_grads"
ROWS = (
    ("gradients of FSDP", f"qwen3_toy {SHARDED} ddp.megatron_fsdp_main_grads_dtype=null", f"qwen3_toy {SHARDED}"),
    ("experts of one rank under FSDP", f"qwen3_moe_toy {SHARDED} ep=2", f"qwen3_moe_toy {SHARDED}"),
    (
        "norm of attention sinks",
        "qwen3_toy tp=2 model.softmax_type=learnable",
        "qwen3_toy model.softmax_type=learnable",
    ),
    (
        "norm of delta nets",
        "qwen3_next_toy tp=2 sp=false model.num_moe_experts=null",
        "qwen3_next_toy tp=2 model.num_moe_experts=null",
    ),
    ("biases of experts", f"{EXPERTS} model.add_bias_linear=true", EXPERTS),
    ("MTP over cp", "qwen3_toy cp=2 model.mtp_num_layers=1", "qwen3_toy model.mtp_num_layers=1"),
    ("mask of MTP", "qwen3_toy model.mtp_num_layers=1 dataset.eod_mask_loss=true", "qwen3_toy model.mtp_num_layers=1"),
    (
        "masked losses over cp",
        "qwen3_toy cp=2 dataset.eod_mask_loss=true",
        "qwen3_toy cp=2 dataset.eod_mask_loss=true model.calculate_per_token_loss=true",
    ),
    ("global_aux_loss", f"{EXPERTS} model.moe_router_load_balancing_type=global_aux_loss", EXPERTS),
    ("aux_loss of a micro-batch", f"{EXPERTS} mbs=2", EXPERTS),
    ("masked losses of a micro-batch", "qwen3_toy gbs=2 mbs=2 dataset.eod_mask_loss=true", "qwen3_toy gbs=2 mbs=2"),
    (
        "sequences of an evaluation",
        "qwen3_toy gbs=2 mbs=2 validation.eval_iters=1",
        "qwen3_toy gbs=4 mbs=2 dp=2 validation.eval_iters=1 validation.eval_micro_batch_size=1 "
        "dataset.data_sharding=false",
    ),
    (
        "blocks of Muon",
        "qwen3_toy tp=2 optimizer.optimizer=muon optimizer.use_distributed_optimizer=false "
        "optimizer.muon_tp_mode=blockwise",
        "qwen3_toy tp=2 optimizer.optimizer=muon optimizer.use_distributed_optimizer=false "
        "optimizer.muon_tp_mode=duplicated",
    ),
)


@pytest.mark.parametrize("name, words, neighbour", ROWS)
def test_a_fault_strikes_the_runs_that_reach_it_and_no_patch_that_is_on(name, words, neighbour):
    fault = next(fault for fault in faults.FAULTS if fault.name == name)
    off = f"patches.off=[{fault.patch.name}]" if fault.patch else ""
    assert fault.live()
    assert name in [known.name for known in faults.known(configured(f"{words} {off}"))]
    assert name not in [known.name for known in faults.known(configured(f"{neighbour} {off}"))]
    mended = name not in [known.name for known in faults.known(configured(words))]
    assert mended == (fault.patch is not None)


def test_invariant_numerics_meet_none_and_each_patch_is_in_the_registry():
    config = compose(
        "qwen3_toy", ["tp=2", "model.softmax_type=learnable", "patches.off=[core-sinks-norm]"], device="cpu"
    )
    assert faults.known(config.config) == []
    assert {fault.patch.name for fault in faults.FAULTS if fault.patch} <= {patch.name for patch in registry.PATCHES}


OUTPUT, ROUTER = "backward/output_layer/output", "backward/decoder.layers.1.mlp.router"
GLOBAL = "qwen3_moe_toy gbs=4 model.moe_router_load_balancing_type=global_aux_loss"
MASKED = "qwen3_toy cp=2 model.mtp_num_layers=1 dataset.eod_mask_loss=true"
BIASES = f"{EXPERTS} model.add_bias_linear=true patches.off=[core-expert-bias-sum]"
EXPERT = "decoder.layers.3.mlp.experts.7.linear_fc2.weight"
BLOCKWISE = ROWS[-1][1]
# A run, the name of its first tensor beyond rounding, the fault that it shows.
SHOWN = (
    (BIASES, "gradients/decoder.layers.0.mlp.experts.7.linear_fc2.bias", "biases of experts"),
    (BIASES, "gradients/decoder.layers.0.mlp.experts.7.linear_fc2.weight", None),
    (BIASES, "gradients/decoder.layers.0.self_attention.linear_proj.bias", None),
    (f"{GLOBAL} dp=2", f"{ROUTER}/auxiliary", "global_aux_loss"),
    (f"{GLOBAL} dp=2", "updates/decoder.layers.1.mlp.router.weight", "global_aux_loss"),
    (f"{GLOBAL} dp=2 model.moe_z_loss_coeff=0.1", f"{ROUTER}/input", None),  # z-loss
    (f"{GLOBAL} tp=2", f"{ROUTER}/auxiliary", None),  # the reference has the same micro-batches
    (f"{EXPERTS} mbs=2", f"{ROUTER}/auxiliary", "aux_loss of a micro-batch"),
    (MASKED, OUTPUT, "masked losses over cp"),
    (f"{MASKED} model.calculate_per_token_loss=true", OUTPUT, "mask of MTP"),
    (MASKED, "forward/output_layer/output", None),  # a tied weight
    (BLOCKWISE, "updates/decoder.layers.0.self_attention.linear_proj.weight", "blocks of Muon"),
    (f"qwen3_moe_toy {SHARDED} ep=2", f"gradients/{EXPERT}", "experts of one rank under FSDP"),
    (BLOCKWISE, "updates/embedding.word_embeddings.weight", None),  # which Adam updates
)


@pytest.mark.parametrize("words, tensor, name", SHOWN)
def test_an_audit_names_the_fault_of_its_tensor_alone(words, tensor, name):
    fault = faults.of_tensor(configured(words), tensor)
    assert (fault.name if fault else None) == name


def test_where_a_patch_reaches_is_reported():
    assert "patch core-expert-bias-sum mends it)" in str(faults.of_tensor(configured(BIASES), SHOWN[0][1]))
    ahead = faults.of_tensor(configured(f"{MASKED} model.calculate_per_token_loss=true"), OUTPUT)
    assert "patch bridge-mtp-mask mends it at cp=1" in str(ahead)
