# SPDX-License-Identifier: Apache-2.0
"""Recipes of Bridge, each with a config.json of Hugging Face cut small."""

import json
from pathlib import Path
from typing import Any

SHORT = (
    "seq=64 gbs=2 iters=2 scheduler.lr_warmup_iters=0 dataset.num_workers=0 validation.eval_iters=0 "
    "validation.eval_interval=null"
)
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": 1024, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_MOE = {
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = SIZES | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "tie_word_embeddings": False,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 2,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 512,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16,
}  # fmt: skip
_SUPER = {  # experts of latents, and multi-token prediction
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME*E",
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4,
    "ssm_state_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": 32, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "vocab_size": 512,
}  # fmt: skip
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


def _dense(kind: str, name: str, **own: Any) -> dict[str, Any]:
    return SIZES | {"model_type": kind, "architectures": [f"{name}ForCausalLM"]} | own


_NO_QUERY_LATENT = {"q_lora_rank": None, "num_nextn_predict_layers": 0}
# A family: the recipe of Bridge, its config.json, and the overrides that a short run needs.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama32_1b_pretrain_config", _dense("llama", "Llama"), ""),
    "qwen2": ("qwen25_500m_pretrain_config", _dense("qwen2", "Qwen2"), ""),
    "qwen3": ("qwen3_600m_pretrain_config", _dense("qwen3", "Qwen3", head_dim=16), ""),
    "qwen3_moe": (
        "qwen3_30b_a3b_pretrain_config",
        _dense("qwen3_moe", "Qwen3Moe", **_QWEN3_MOE),
        "precision=bf16 ep=1 scheduler.lr_decay_iters=null",
    ),
    "moonlight": ("moonlight_16b_pretrain_config", _LATENT | _NO_QUERY_LATENT | {"n_group": 1, "topk_group": 1}, ""),
    "deepseek": (
        "deepseek_v3_pretrain_config",
        _LATENT | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1},
        "",
    ),
    "deepseek_v2": (
        "deepseek_v2_lite_pretrain_config",
        _LATENT
        | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        | {"q_lora_rank": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0},
        "",
    ),
    "gpt_oss": ("gpt_oss_20b_pretrain_config", _GPT_OSS, ""),
    "qwen3_next": ("qwen3_next_80b_a3b_pretrain_config", _QWEN3_NEXT, ""),
    "nemotron_super": ("nemotron_3_super_pretrain_16gpu_h100_bf16_config", _SUPER, ""),
}
DENSE = ("llama", "qwen2", "qwen3", "qwen3_moe")  # and the same with experts


def folder(root: Path, family: str) -> Path:
    """A folder with the family's config.json."""
    made = root / family
    if not made.exists():
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps(FAMILIES[family][1]))
    return made
