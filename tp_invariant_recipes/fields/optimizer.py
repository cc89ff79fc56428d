# SPDX-License-Identifier: Apache-2.0
"""How weights are updated: the optimizer, its schedule, and distributed data parallelism."""

from tp_invariant_recipes.fields.field import (
    ANY,
    BELOW_1,
    BOOL,
    BYTES,
    COUNT,
    NONE,
    NULL,
    NUMBER,
    OFF,
    ON,
    POSITIVE,
    READS,
    SHARE,
    SIGNED,
    THRESHOLD,
    UNKNOWN,
    only,
    row,
    section,
)
from tp_invariant_recipes.settings.run_config import STRATEGIES

_ELEMENT = "the optimizer computes every element alone"
_NORM = "the gradient norm is one number for all ranks"
_KNOWN = "only Adam, SGD and Muon have invariant versions"
_MUON = "Muon's matrices are whole in every layout"
_FP16 = "fp16 and its loss scale are not covered"
_FP8 = "FP8 and FP4 scales depend on how a tensor is sharded"
_FP32 = "gradients are accumulated in fp32"
_STATES = "states in fp16 or FP8 have a scale that depends on how a tensor is sharded"
_OFFLOAD = "an optimizer on the CPU rounds differently"
_SWITCH = "sums inside a switch (NVLS, SHARP) have an order of their own"
_TREE = "one tree adds the ranks' gradients, in whatever pieces and whenever they are sent"
_WAITS = "a layer waits for the weights that it reads"
_FP16_ONLY = "only fp16 reads it"
_GRAPH = "forward and backward passes are captured, and nothing else"
_FSDP = "FSDP reduces gradients in an order of its own"
_SAME = "Megatron-FSDP has the sums of DistributedDataParallel"
_COMPLETE = "norm weight gradients are complete only when a backward pass ends"
_READ_EARLY = "layers read weights that are still being gathered"
_UNREAD = "Megatron-Bridge does not read it"
_SCHEDULE = "one number a step, from the step's number"
_STEPS = "tpi counts steps, not samples"

OPTIMIZER = section(
    row(only("adam", "sgd", "muon"), "optimizer", _KNOWN),
    row(NUMBER, "lr min_lr decoupled_lr decoupled_min_lr weight_decay", _ELEMENT),
    row(NUMBER, "adam_beta1 adam_beta2 sgd_momentum", _ELEMENT, BELOW_1),
    row(NUMBER, "adam_eps", _ELEMENT, POSITIVE),
    row(BOOL, "apply_wd_to_qk_layernorm decoupled_weight_decay bf16 use_precision_aware_optimizer "
        "store_param_remainders ~use_distributed_optimizer", _ELEMENT),
    row(NUMBER, "clip_grad", _NORM),
    row(THRESHOLD, "grad_norm_skip_threshold", _NORM, POSITIVE),
    row(only("bfloat16", "float32"), "params_dtype", _FP16),
    row(OFF, "fp16", _FP16),
    row(NULL, "loss_scale", _FP16, POSITIVE),
    row(NUMBER, "initial_loss_scale min_loss_scale loss_scale_window", _FP16_ONLY, POSITIVE),
    row(NUMBER, "hysteresis", _FP16_ONLY, COUNT),
    # Bridge's bf16_mixed names tensorwise, although no product is in FP8.
    row(only(None, "tensorwise"), "fp8_recipe", _FP8),
    row(OFF, "reuse_grad_buf_for_mxfp8_param_ag", _FP8, adjust_to=False),
    row(only("float32"), "main_grads_dtype", _FP32, adjust_to="float32"),
    row(only("float32"), "main_params_dtype", _STATES, adjust_to="float32"),
    row(only("float32", "bfloat16"), "exp_avg_dtype exp_avg_sq_dtype", _STATES),
    # check/invariant/training.py has what Muon must have of these, and what others must not set.
    row(NUMBER, "muon_momentum", _MUON, BELOW_1),
    row(NUMBER, "muon_num_ns_steps", _MUON, COUNT),
    row(NUMBER, "muon_extra_scale_factor", _MUON),
    row(BOOL, "muon_nesterov muon_split_qkv ~use_layer_wise_distributed_optimizer", _MUON),
    row(only("spectral", "shape_scaling", "unit_rms_norm"), "muon_scale_mode", _MUON),
    row(only("highest", "high", "medium"), "muon_fp32_matmul_prec", _MUON),
    row(only("quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"), "muon_coefficient_type", _MUON),
    row(only("blockwise", "duplicated"), "muon_tp_mode", _MUON),
    row(only("adam"), "muon_scalar_optimizer", _KNOWN),
    row(only(0.95), "lion_beta1 soap_shampoo_beta adaptive_muon_beta2", _KNOWN, BELOW_1),
    row(ON, "soap_use_kl_shampoo", _KNOWN),
    row(only(0.98), "lion_beta2", _KNOWN, BELOW_1),
    row(only(1), "soap_precondition_frequency", _KNOWN, COUNT),
    row(only("adamuon"), "adaptive_muon_moment2_method", _KNOWN),
    row(only(1e-08), "adaptive_muon_eps", _KNOWN, POSITIVE),
    row(BOOL, "~overlap_param_gather", _WAITS),
    row(OFF, "~overlap_param_gather_with_optimizer_step", _READ_EARLY, adjust_to=False),
    row(OFF, "optimizer_cpu_offload use_torch_optimizer_for_cpu_offload ~overlap_cpu_optimizer_d2h_h2d", _OFFLOAD),
    row(only(0.0), "optimizer_offload_fraction", _OFFLOAD, SHARE),
    row(BOOL, "pin_cpu_grads pin_cpu_params", BYTES),
    row(OFF, "optimizer_cuda_graph", _GRAPH, adjust_to=False),
    row(BOOL, "log_num_zeros_in_grad barrier_with_L1_time", READS),
    row(ANY, "timers config_logger_dir", READS),
)  # fmt: skip

SCHEDULER = section(
    row(ANY, "lr_decay_style lr_wsd_decay_style lr_warmup_iters lr_warmup_init start_weight_decay end_weight_decay "
        "weight_decay_incr_style", _SCHEDULE),
    row(ANY, "lr_decay_iters lr_wsd_decay_iters max_steps", _SCHEDULE, COUNT),
    row(ANY, "lr_warmup_fraction", _SCHEDULE, BELOW_1),
    row(BOOL, "~override_opt_param_scheduler ~use_checkpoint_opt_param_scheduler", _SCHEDULE),
    row(NULL, "lr_decay_samples lr_wsd_decay_samples", _STEPS, COUNT),
    row(only(0), "lr_warmup_samples", _STEPS),
    row(NULL, "no_weight_decay_cond_type", _UNREAD),
)  # fmt: skip

DDP = section(
    row(ON, "grad_reduce_in_fp32", _FP32, adjust_to=True),
    row(only(()), "param_name_patterns_for_fp32_local_accumulation", _FP32),
    row(OFF, "reduce_scatter_with_fp32_accumulation", _TREE, adjust_to=False),
    row(OFF, "~average_in_collective", "each rank divides its gradient by dp before the sum", adjust_to=False),
    row(BOOL, "~overlap_grad_reduce pad_buckets_for_high_nccl_busbw", _TREE),
    # null: from a section comm_overlap
    row(only(False, None), "delay_wgrad_compute", _COMPLETE, adjust_to=False),
    row(BOOL, "~overlap_param_gather", _WAITS),
    row(OFF, "align_param_gather", _READ_EARLY, adjust_to=False),
    row(BOOL, "~use_distributed_optimizer", _ELEMENT),
    row(only(1), "num_distributed_optimizer_instances",
        "several instances reduce gradients in two sums", COUNT, adjust_to=1),
    row(NUMBER, "~bucket_size num_buckets", _TREE, COUNT),
    row(BOOL, "check_for_nan_in_grad check_for_large_grads", READS),
    row(OFF, "nccl_ub disable_symmetric_registration", _SWITCH, adjust_to=False),
    row(OFF, "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache", _FP8, adjust_to=False),
    row(OFF, "fp4_param_gather", _FP8),
    row(BOOL, "~use_megatron_fsdp", _SAME),
    row(OFF, "fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_manual_registration "
        "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer", _FSDP, adjust_to=False),
    row(OFF, "use_custom_fsdp", _FSDP),
    row(only(*STRATEGIES), "~data_parallel_sharding_strategy", "FSDP has no such strategy"),
    row(only("no_shard"), "outer_dp_sharding_strategy", _FSDP, adjust_to="no_shard"),
    row(ON, "gradient_reduce_div_fusion", _FSDP),
    row(ON, "fsdp_all_gather_in_start_param_sync", _FSDP, adjust_to=True),
    row(NULL, "suggested_communication_unit_size", _FSDP, COUNT, adjust_to=None),
    row(only(None, "float32"), "~megatron_fsdp_main_grads_dtype", _FP32, adjust_to="float32"),
    row(NULL, "megatron_fsdp_grad_comm_dtype", _FSDP, adjust_to=None),
    row(only("float32"), "megatron_fsdp_main_params_dtype", _FSDP),
)  # fmt: skip


# Numbers of a precision. Its other fields have rules: check/relations.py, check/invariant/fp8.py.

MIXED_PRECISION = section(
    row(ON, "grad_reduce_in_fp32", "a sum of gradients is fp32", adjust_to=True),
    row(NONE, "hysteresis fp8_amax_history_len", UNKNOWN, COUNT),
    row(NONE, "loss_scale initial_loss_scale min_loss_scale loss_scale_window", UNKNOWN, POSITIVE),
    row(NONE, "fp8_margin", UNKNOWN, SIGNED),
)
