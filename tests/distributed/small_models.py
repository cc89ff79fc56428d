# SPDX-License-Identifier: Apache-2.0
"""Models of conf/model cut smaller still: every kind of layer is left, and a training takes seconds."""

from collections.abc import Mapping

DENSE = "qwen3_toy seq=32 model.num_layers=1"
# A run of two ranks with two checkpoints, to be killed, stopped and continued (tests/distributed/runs).
SAVED = ("qwen3_toy", "model.num_layers=1", "tp=2", "seq=32", "gbs=1", "numerics=stock", "iters=4", "save=2")
SHORTEST = "qwen3_toy seq=16 gbs=2 iters=1 model.num_layers=1 numerics.data_shards=1"  # of tests of several modes
# What is added to a model: whole layers computed again; another optimizer.
RECOMPUTED = "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1"
# What distributes weights and optimizer states, with several buckets of gradients a rank; and all that overlaps.
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
BUCKETS = "ddp.overlap_grad_reduce=true ddp.bucket_size=20000"
GATHER = f"{DISTRIBUTED} {BUCKETS} ddp.overlap_param_gather=true optimizer.overlap_param_gather=true"
MUON = "optimizer.optimizer=muon optimizer.muon_tp_mode=duplicated"

_EXPERTS = {
    "hidden_size": 64, "moe_ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16,
    "vocab_size": 512,
}  # fmt: skip
_LATENT = {
    "num_layers": 2, "moe_layer_freq": "[0,1]", "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8,
    "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 32, "vocab_size": 512,
    "num_moe_experts": 8, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip

_SIZES: Mapping[str, Mapping[str, object]] = {
    "qwen3_moe_toy": _EXPERTS | {"num_layers": 2, "ffn_hidden_size": 256},
    "nemotron3_nano_toy": _EXPERTS
    | {
        "hybrid_layer_pattern": "ME*E", "ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": 128,
        "mamba_num_heads": 8, "mamba_num_groups": 4, "mamba_head_dim": 16, "mamba_state_dim": 16,
    },
    "deepseek_v3_toy": _LATENT | {"q_lora_rank": 32},  # latents of queries, scaled positions, groups of experts
    "moonlight_toy": _LATENT,
}  # fmt: skip


def small(model: str) -> str:
    """The words of a model with experts: its name and the overrides that cut it."""
    return " ".join((model, "seq=32 gbs=1", *(f"model.{name}={value}" for name, value in _SIZES[model].items())))
