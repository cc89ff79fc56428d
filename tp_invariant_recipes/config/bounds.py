"""What numbers may be, one row a key: counts that are at least 1, shares below 1, and the largest counts of a run.

A number without a row must be finite and at least 0. So a slip of the keyboard is refused by its name, before a rule
divides by it, counts up to it, or Megatron takes it as "off".
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.keys import SHORT_KEYS

Tree = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """What a finite number may be. words: what follows "KEY=VALUE: must be"."""

    words: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range("at least 0", lambda n: n >= 0)
COUNT = Range("at least 1", lambda n: n >= 1)
POSITIVE = Range("above 0", lambda n: n > 0)
SHARE = Range("from 0 to 1", lambda n: 0 <= n <= 1)
BELOW_1 = Range("at least 0 and below 1", lambda n: 0 <= n < 1)
PART = Range("above 0 and at most 1", lambda n: 0 < n <= 1)
SIGNED = Range("a finite number", lambda n: True)
# numpy takes seeds below 2**32, and Megatron adds 100 for each pipeline stage.
SEED = Range(f"from 1 to {2**32 - 2**24}", lambda n: 1 <= n <= 2**32 - 2**24)
NICE = Range("from -20 to 19", lambda n: -20 <= n <= 19)  # of a process, as in setpriority(2)
PORT = Range("from 1 to 65535", lambda n: 1 <= n <= 65535)

# Range -> section -> its fields.
RANGES: dict[Range, dict[str, str]] = {
    COUNT: {
        "model": "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels vocab_size "
        "make_vocab_size_divisible_by rotary_base num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage recompute_num_layers "
        "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_latent_size moe_router_topk "
        "moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices "
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_chunk_size "
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "fp8_interval fp8_amax_history_len gtp_weight_remat_size expert_gtp_weight_remat_size "
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards mlp_chunks_for_training",
        "train": "train_samples exit_interval exit_duration_in_mins check_weight_hash_across_dp_replicas_interval",
        "scheduler": "lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples max_steps",
        "optimizer": "hysteresis muon_num_ns_steps soap_precondition_frequency",
        "ddp": "num_distributed_optimizer_instances bucket_size num_buckets suggested_communication_unit_size",
        "dataset": "num_dataset_builder_threads data_parallel_size context_parallel_size "
        "offline_packing_specs.packed_sequence_size offline_packing_specs.max_single_sequence_length "
        "offline_packing_specs.pad_seq_to_mult",
        "tokenizer": "vocab_size padded_vocab_size make_vocab_size_divisible_by tensor_model_parallel_size",
        "checkpoint": "save_retain_interval save_params_interval save_activations_interval save_wgrads_interval "
        "save_dgrads_interval save_tokens_per_expert_interval non_persistent_save_interval replication_jump "
        "replication_factor storage_writers_per_rank dist_ckpt_workers hf_save_every_n_ranks",
        "validation": "eval_interval eval_global_batch_size eval_micro_batch_size",
        "logger": "log_interval throughput_window_size tensorboard_log_interval tensorboard_queue_size "
        "log_memory_interval",
        "dist": "distributed_timeout_minutes distributed_timeout_seconds_after_init eval_context_parallel_size",
        "mixed_precision": "hysteresis fp8_amax_history_len",
        "nvrx_straggler": "num_gpu_perf_scores_to_print profiling_interval",
        "peft": "dim",
        "cluster": "ranks_per_node",
        "slurm": "save_before tries rendezvous_timeout",
        "guard": "every products",
    },
    POSITIVE: {
        "model": "layernorm_epsilon softmax_scale init_method_std embedding_init_method_std rope_scaling_factor "
        "rotary_scaling_factor seq_len_interpolation_factor moe_router_topk_scaling_factor moe_expert_capacity_factor",
        "train": "num_epochs",
        "optimizer": "adam_eps adaptive_muon_eps loss_scale initial_loss_scale min_loss_scale loss_scale_window "
        "grad_norm_skip_threshold",
        "mixed_precision": "loss_scale initial_loss_scale min_loss_scale loss_scale_window",
        "rerun_state_machine": "spiky_loss_factor",
        "nvrx_straggler": "report_time_interval",
    },
    BELOW_1: {
        "model": "hidden_dropout attention_dropout moe_input_jitter_eps",
        "optimizer": "adam_beta1 adam_beta2 lion_beta1 lion_beta2 sgd_momentum muon_momentum soap_shampoo_beta "
        "adaptive_muon_beta2",
        "scheduler": "lr_warmup_fraction",
    },
    SHARE: {
        "optimizer": "optimizer_offload_fraction",
        "model": "activation_offload_fraction hybrid_attention_ratio hybrid_mlp_ratio",
        "nvrx_straggler": "gpu_relative_perf_threshold gpu_individual_perf_threshold",
        "peft": "dropout",
    },
    PART: {"model": "rotary_percent"},
    SEED: {"rng": "seed"},
    PORT: {"straggler": "straggler_ctrlr_port"},
    NICE: {"checkpoint": "async_ckpt_cpu_priority"},
    SIGNED: {
        # -1 stands for "none" or "all", or the number may well be negative.
        "checkpoint": "most_recent_k",
        "tokenizer": "null_tokenizer_pad_id",
        "dataset": "offline_packing_specs.num_tokenizer_workers",
        "model": "window_size glu_linear_offset moe_router_force_biased mup_attn_scale_power fp8_margin "
        "delta_offload_bytes_across_pp_ranks yarn_mscale yarn_mscale_all_dim "
        "cuda_graph_warmup_steps",  # has a rule of its own, as have the next two
        "numerics": "virtual_shards data_shards context_shards",
        "ledger": "digests",
        "mixed_precision": "fp8_margin",
    },
}
# The short keys are counts, but for these.
SHORT_RANGES = {"sp": SIGNED, "lr": NOT_NEGATIVE, "seed": SEED, "save": NOT_NEGATIVE}

BY_PATH = {
    f"{section}.{name}": range_
    for range_, sections in RANGES.items()
    for section, names in sections.items()
    for name in names.split()
}
BY_PATH |= {key.path: SHORT_RANGES.get(key.name, COUNT) for key in SHORT_KEYS.values() if isinstance(key.type, type)}

# Numbers that may be infinite: a threshold that nothing reaches.
INFINITE = {"optimizer.grad_norm_skip_threshold"}

# The largest counts. Beyond them a loop or a table of Megatron's never ends. They stop slips of the keyboard, not large
# runs: each leaves far more room than any run that we know of needs.
LARGEST = 2**31 - 1  # what a 32-bit integer holds

_DEGREE = 2**16  # ranks along one dimension
SHORT = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp"), _DEGREE),
    **dict.fromkeys(("mbs", "gbs"), 2**24),
    "seq": 2**27,
    "iters": LARGEST,
    "save": LARGEST,
}
LIMITS = {SHORT_KEYS[name].path: limit for name, limit in SHORT.items()}
# The other whole numbers, by section: libraries keep sizes of a model in 32 bits, anything else in 64.
SECTIONS = {"model": LARGEST}
WIDEST = 2**63 - 1

_NAMES = {key.path: key.name for key in SHORT_KEYS.values()}


def wrong(tree: Tree) -> dict[str, str]:
    """Path -> problem, for every number that is none, is outside of its range, or is larger than its bound."""
    found: dict[str, str] = {}
    for path, value in _numbers("", tree):
        if must := _must(path, value):
            found.setdefault(path, f"{_NAMES.get(path, path)}={value}: must be {must}")
    return found


def _must(path: str, value: float) -> str | None:
    """What the number at a path must be and is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if value > 0 and path in INFINITE else "a finite number"
    allowed = BY_PATH.get(path, NOT_NEGATIVE)
    if not allowed.holds(value):
        return allowed.words
    limit = LIMITS.get(path, SECTIONS.get(path.partition(".")[0], WIDEST))
    if isinstance(value, int) and abs(value) > limit:
        return f"at most {limit}" if value > 0 else f"at least -{limit}"
    return None


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a tree and its dotted path; numbers in a list have the path of the list."""
    if type(value) in (int, float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(path, inner)
