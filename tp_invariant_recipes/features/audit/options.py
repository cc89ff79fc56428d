"""What `tpi audit --all` tries: layouts, options that have had silent faults, and sizes that train in seconds."""

from collections.abc import Mapping
from typing import Any

TEXTS = "{texts}"  # stands for a folder of short texts, whose ends are masked

# Axis -> settings, of which a run has at most one. Every model tries those that it may have.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "tensor": ("tp=2", "tp=2 sp=false"),
    "pipeline": ("pp=2",),
    "data": ("dp=2",),
    "context": ("cp=2",),
    "experts": ("ep=2",),
    "batch": ("mbs=2",),
}
# Axes of models with experts; the others have these fields and no use of them.
OF_EXPERTS = ("experts", "balance", "router")
# Axes of which a model tries the first setting that it may have.
FIRST_ALLOWED = ("ahead", "biases", "evaluation")
_EVALUATED = "validation.eval_iters=2 validation.eval_interval=1"
OF_EXAMPLES = ("packing",)  # of fine-tuning data
_BALANCED = "model.moe_aux_loss_coeff=0.1 model.moe_router_load_balancing_type="
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "loss": ("model.calculate_per_token_loss=true",),
    "masks": (f"data=text data.path={TEXTS} data.tokenizer=byte dataset.eod_mask_loss=true dataset.split='90,5,5'",),
    "ahead": ("model.mtp_num_layers=1 model.mtp_hybrid_override_pattern='*E'", "model.mtp_num_layers=1"),
    "sinks": ("model.softmax_type=learnable",),
    "biases": ("model.add_bias_linear=true model.add_qkv_bias=true", "model.add_qkv_bias=true"),
    "embedding": (
        "model.share_embeddings_and_output_weights=true",
        "model.share_embeddings_and_output_weights=false",
    ),
    "balance": tuple(f"{_BALANCED}{kind}" for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")),
    "router": ("model.moe_z_loss_coeff=0.1",),
    "optimizer": (
        "optimizer.use_distributed_optimizer=true",
        "optimizer.optimizer=muon optimizer.use_distributed_optimizer=false optimizer.muon_tp_mode=duplicated seq=128",
        "optimizer.optimizer=muon optimizer.use_distributed_optimizer=false optimizer.muon_tp_mode=blockwise seq=128",
    ),
    "recompute": ("model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",),
    # Without the last two another mbs or dp evaluates other sequences under stock (patches/faults.py).
    "evaluation": (f"{_EVALUATED} validation.eval_micro_batch_size=1 dataset.data_sharding=false", _EVALUATED),
    "adapters": ("peft=lora peft.dim=8",),
    "packing": ("dataset.enable_offline_packing=true", "dataset.enable_offline_packing=false"),
}

_AXES = {setting: (name, axis) for name, axis in OPTIONS.items() for setting in axis}


def label(setting: str) -> str:
    """Return a short name of a setting: the axis of an option, with the value that no other of the axis has."""
    name, axis = _AXES.get(setting, (setting, ()))
    others = {word for other in axis if other != setting for word in other.split()}
    own = next((word for word in setting.split() if word not in others), None) if others else None
    return f"{name}:{own.rpartition('=')[2]}" if own else name


# Field of a model -> the largest value that is tried.
_LARGEST = {
    **dict.fromkeys(("hidden_size", "moe_ffn_hidden_size"), 64),
    **dict.fromkeys(("ffn_hidden_size", "moe_shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("kv_channels", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_state_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "linear_num_key_heads", "mamba_num_groups"), 4),
    **dict.fromkeys(("num_moe_experts", "linear_num_value_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    "vocab_size": 512,
}
BATCHES = (("seq=32", "gbs=4"), ("seq=128", "gbs=4"))  # the first that a model may have


def sizes(model: Mapping[str, Any], typed: set[str]) -> list[str]:
    """Return overrides that cut a model. typed: the fields that the user gave, which stay."""
    cut: dict[str, int | str] = {
        name: most
        for name, most in _LARGEST.items()
        if isinstance(now := model.get(name), int) and now > most and f"model.{name}" not in typed
    }
    if isinstance(layers := model.get("num_layers"), int) and layers > 2 and "model.num_layers" not in typed:
        cut["num_layers"] = 2
        if isinstance(dense := model.get("moe_layer_freq"), list):
            cut["moe_layer_freq"] = f"[{dense[0]},{dense[-1]}]"
    pattern = model.get("hybrid_layer_pattern") or ""
    kinds = "".join(dict.fromkeys(pattern))
    if 2 * len(kinds) < len(pattern) and not {*"|/"} & {*kinds} and "model.hybrid_layer_pattern" not in typed:
        cut["hybrid_layer_pattern"] = 2 * kinds  # each stage of pp=2 has all
    return [f"model.{name}={value}" for name, value in cut.items()]
