"""The values that the invariant numerics allow for the fields of Bridge's `optimizer`, `ddp` and `dist` sections.

One row a field: the values, and the reason. tpi refuses every other value, and every field without a row. The lists of
the other sections are in `allowed_sections.py`, but for `model` (`model_fields.py`).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tp_invariant_recipes.coverage import allowed_sections
from tp_invariant_recipes.coverage.allowed_values import (
    ANY,
    BOOL,
    BYTES,
    NO_BITS,
    NONE,
    NUMBER,
    OFF,
    PLACE,
    READS,
    THRESHOLD,
    TIME,
    Rows,
    as_text,
    only,
    rows,
)
from tp_invariant_recipes.settings.schema import PROVIDER
from tp_invariant_recipes.settings.sections import OWN_KEYS

_ELEMENT = "the optimizer computes every element alone"
_NORM = "the gradient norm is one number for all ranks"
_ADAM = "only adam and sgd compute every element alone"
_FP16 = "fp16 and its loss scale are not covered"
_FP8 = "FP8 and FP4 scales depend on how a tensor is cut"
_FP32 = "gradients are accumulated in fp32"
_STATES = "states in fp16 or FP8 have a scale that depends on how a tensor is cut"
_OFFLOAD = "an optimizer on the CPU rounds differently"
_SWITCH = "sums inside a switch (NVLS, SHARP) have an order of their own"
_TREE = "one tree adds the ranks' gradients, in whatever pieces and whenever they are sent"
_WAITS = "a layer waits for the weights that it reads"
_FP16_ONLY = "only fp16 reads it"
_GRAPH = "forward and backward passes are captured, and nothing else"
_FSDP = "FSDP reduces gradients in an order of its own"
_COMPLETE = "norm weight gradients are complete only when a backward pass ends"
_READ_EARLY = "layers read weights that are still being gathered"

OPTIMIZER = rows(
    (only("adam", "sgd"), _ADAM, "optimizer"),
    (NUMBER, _ELEMENT, "lr min_lr decoupled_lr decoupled_min_lr weight_decay adam_beta1 adam_beta2 adam_eps "
     "sgd_momentum"),
    (BOOL, _ELEMENT, "apply_wd_to_qk_layernorm decoupled_weight_decay bf16 use_precision_aware_optimizer "
     "store_param_remainders use_distributed_optimizer"),
    (NUMBER, _NORM, "clip_grad"),
    (THRESHOLD, _NORM, "grad_norm_skip_threshold"),
    (only("bfloat16", "float32"), _FP16, "params_dtype"),
    (OFF, _FP16, "fp16"),
    (only(None), _FP16, "loss_scale"),
    (NUMBER, _FP16_ONLY, "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
    # Bridge's bf16_mixed names tensorwise, although no product is in FP8.
    (only(None, "tensorwise"), _FP8, "fp8_recipe"),
    (OFF, _FP8, "reuse_grad_buf_for_mxfp8_param_ag"),
    (only("float32"), _FP32, "main_grads_dtype"),
    (only("float32"), _STATES, "main_params_dtype"),
    (only("float32", "bfloat16"), _STATES, "exp_avg_dtype exp_avg_sq_dtype"),
    (only(0.95), _ADAM, "muon_momentum lion_beta1 soap_shampoo_beta adaptive_muon_beta2"),
    (only(True), _ADAM, "muon_split_qkv soap_use_kl_shampoo"),
    (OFF, _ADAM, "muon_nesterov use_layer_wise_distributed_optimizer"),
    (only("spectral"), _ADAM, "muon_scale_mode"),
    (only("medium"), _ADAM, "muon_fp32_matmul_prec"),
    (only("quintic"), _ADAM, "muon_coefficient_type"),
    (only(5), _ADAM, "muon_num_ns_steps"),
    (only("blockwise"), _ADAM, "muon_tp_mode"),
    (only(1.0), _ADAM, "muon_extra_scale_factor"),
    (only("adam"), _ADAM, "muon_scalar_optimizer"),
    (only(0.98), _ADAM, "lion_beta2"),
    (only(1), _ADAM, "soap_precondition_frequency"),
    (only("adamuon"), _ADAM, "adaptive_muon_moment2_method"),
    (only(1e-08), _ADAM, "adaptive_muon_eps"),
    (BOOL, _WAITS, "overlap_param_gather"),
    (OFF, _READ_EARLY, "overlap_param_gather_with_optimizer_step"),
    (OFF, _OFFLOAD, "optimizer_cpu_offload use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d"),
    (only(0.0), _OFFLOAD, "optimizer_offload_fraction"),
    (BOOL, BYTES, "pin_cpu_grads pin_cpu_params"),
    (OFF, _GRAPH, "optimizer_cuda_graph"),
    (BOOL, READS, "log_num_zeros_in_grad barrier_with_L1_time"),
    (ANY, READS, "timers config_logger_dir"),
)  # fmt: skip

DDP = rows(
    (only(True), _FP32, "grad_reduce_in_fp32"),
    (only(()), _FP32, "param_name_patterns_for_fp32_local_accumulation"),
    (OFF, _TREE, "reduce_scatter_with_fp32_accumulation"),
    (OFF, "each rank divides its gradient by dp before the sum", "average_in_collective"),
    (BOOL, _TREE, "overlap_grad_reduce pad_buckets_for_high_nccl_busbw"),
    (OFF, _COMPLETE, "delay_wgrad_compute"),
    (BOOL, _WAITS, "overlap_param_gather"),
    (OFF, _READ_EARLY, "align_param_gather"),
    (BOOL, _ELEMENT, "use_distributed_optimizer"),
    (only(1), "several instances reduce gradients in two sums", "num_distributed_optimizer_instances"),
    (NUMBER, _TREE, "bucket_size num_buckets"),
    (BOOL, READS, "check_for_nan_in_grad check_for_large_grads"),
    (OFF, _SWITCH, "nccl_ub disable_symmetric_registration"),
    (OFF, _FP8, "fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache"),
    (OFF, _FSDP, "use_megatron_fsdp use_custom_fsdp fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail "
     "fsdp_manual_registration megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
     "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"),
    (only("no_shard"), _FSDP, "data_parallel_sharding_strategy outer_dp_sharding_strategy"),
    (only(True), _FSDP, "gradient_reduce_div_fusion fsdp_all_gather_in_start_param_sync"),
    (only(None), _FSDP, "suggested_communication_unit_size megatron_fsdp_main_grads_dtype "
     "megatron_fsdp_grad_comm_dtype"),
    (only("float32"), _FSDP, "megatron_fsdp_main_params_dtype"),
)  # fmt: skip

DIST = rows(
    (only("nccl", "gloo"), "the sums of other backends are not covered", "distributed_backend"),
    (BOOL, BYTES, "use_gloo_process_groups align_grad_reduce"),
    (OFF, _FSDP, "use_megatron_fsdp use_torch_fsdp2"),
    (OFF, _SWITCH, "use_sharp"),
    (only(None), _SWITCH, "sharp_enabled_group"),
    (only(None), "the file may choose how NCCL adds", "nccl_communicator_config_path"),
    (OFF, "the owner of an expert follows from Megatron's default order of ranks", "use_tp_pp_dp_mapping"),
    (OFF, "the invariant layers take their groups from Megatron's parallel state", "use_decentralized_pg"),
    (only(None), "evaluation has the context parallelism of training", "eval_context_parallel_size"),
    (OFF, "experimental layers have no invariant version", "enable_megatron_core_experimental"),
    (BOOL, "fused functions compute every element alone", "disable_jit_fuser"),
    (BOOL, PLACE, "external_gpu_device_mapping"),
    (ANY, PLACE, "local_rank"),
    (OFF, "each rank sets up its groups before it builds its layers", "lazy_mpu_init"),
    (ANY, TIME, "high_priority_stream_groups distributed_timeout_minutes distributed_timeout_seconds_after_init"),
    (ANY, READS, "flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout "
     "flight_recorder_include_stack_trace flight_recorder_include_only_active flight_recorder_extra_dump_on_exec"),
)  # fmt: skip

SECTIONS: dict[str, Rows] = {"optimizer": OPTIMIZER, "ddp": DDP, "dist": DIST, **allowed_sections.OTHERS}


def values_of(config: Any) -> dict[str, Any]:
    """The fields of an object of Megatron's that can be set: name -> value."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init and f.name[0] != "_"}


def refused(section: str, given: Mapping[str, Any]) -> list[str]:
    """One line for every field whose value is not allowed: the reason, and the values that are.

    section: one of SECTIONS. given: name -> value, as a composed tree or an object of Megatron's has it.
    """
    lines = []
    for name, value in given.items():
        key = f"{section}.{name}"
        if name == PROVIDER or key in OWN_KEYS:
            continue
        # Without a row nobody has read what the field does.
        values, why = SECTIONS[section].get(name, (NONE, "the invariant numerics do not know this field"))
        if not values.accepts(value):
            lines.append(f"{key}={as_text(value)}: {why}; {values.remedy.format(key=key)}")
    return lines


def changes_bits(key: str) -> bool:
    """Whether a field, by its dotted path, may change what a run computes. A field that no list has may."""
    section, _, name = key.partition(".")
    _, why = SECTIONS.get(section, {}).get(name.partition(".")[0], (NONE, ""))
    return why not in NO_BITS
