"""The values that the invariant numerics allow for the fields of Bridge's `optimizer`, `ddp` and `dist` sections.

One row a field: the values, and the reason. tpi refuses every other value, and every field without a row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Values:
    """Values that a field may have.

    accepts: whether a value is one of them. remedy: what to set instead; {key} stands for the field.
    """

    accepts: Callable[[Any], bool]
    remedy: str


def _only(*values: Any) -> Values:
    # To Python True is 1, and False is 0.
    return Values(
        lambda value: any(_plain(value) == v and isinstance(value, bool) is isinstance(v, bool) for v in values),
        "{key}=" + " or ".join(map(_as_text, values)),
    )


def _plain(value: Any) -> Any:
    """A list as a tuple, and a dtype of torch by its name, so that a tree's value equals an object's."""
    if isinstance(value, list):
        return tuple(value)
    return str(value).removeprefix("torch.") if isinstance(value, str) or type(value).__name__ == "dtype" else value


def _as_text(value: Any) -> str:
    """A value as the command line has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value)) if isinstance(value, list | tuple) else str(_plain(value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


NUMBER = Values(_is_number, "give {key} a finite number")
THRESHOLD = Values(lambda value: value == math.inf or _is_number(value), "give {key} a number")
BOOL = Values(lambda value: isinstance(value, bool), "{key}=true or false")
ANY = Values(lambda value: True, "")
NONE = Values(lambda value: False, "leave {key} unset")
OFF = _only(False)

_ELEMENT = "the optimizer computes every element alone"
_NORM = "the gradient norm is one number for all ranks"
_ADAM = "only adam and sgd compute every element alone"
_FP16 = "fp16 and its loss scale are not covered"
_FP8 = "FP8 and FP4 scales depend on how a tensor is cut"
_FP32 = "gradients are accumulated in fp32"
_STATES = "states in fp16 or FP8 have a scale that depends on how a tensor is cut"
_OFFLOAD = "an optimizer on the CPU rounds differently"
_READS = "it only reads"
_BYTES = "it only moves bytes"
_SWITCH = "sums inside a switch (NVLS, SHARP) have an order of their own"
_TIME = "it only decides when"
_PLACE = "it only decides where"
_TREE = "one tree adds the ranks' gradients, in whatever pieces and whenever they are sent"
_WAITS = "a layer waits for the weights that it reads"
_FP16_ONLY = "only fp16 reads it"
_GRAPH = "forward and backward passes are captured, and nothing else"
_FSDP = "FSDP reduces gradients in an order of its own"
_COMPLETE = "norm weight gradients are complete only when a backward pass ends"
_READ_EARLY = "layers read weights that are still being gathered"

OPTIMIZER: dict[str, tuple[Values, str]] = {
    "optimizer": (_only("adam", "sgd"), _ADAM),
    "lr": (NUMBER, _ELEMENT),
    "min_lr": (NUMBER, _ELEMENT),
    "decoupled_lr": (NUMBER, _ELEMENT),
    "decoupled_min_lr": (NUMBER, _ELEMENT),
    "weight_decay": (NUMBER, _ELEMENT),
    "apply_wd_to_qk_layernorm": (BOOL, _ELEMENT),
    "decoupled_weight_decay": (BOOL, _ELEMENT),
    "adam_beta1": (NUMBER, _ELEMENT),
    "adam_beta2": (NUMBER, _ELEMENT),
    "adam_eps": (NUMBER, _ELEMENT),
    "sgd_momentum": (NUMBER, _ELEMENT),
    "clip_grad": (NUMBER, _NORM),
    "grad_norm_skip_threshold": (THRESHOLD, _NORM),
    # Precision.
    "bf16": (BOOL, _ELEMENT),
    "params_dtype": (_only("bfloat16", "float32"), _FP16),
    "fp16": (OFF, _FP16),
    "loss_scale": (_only(None), _FP16),
    "initial_loss_scale": (NUMBER, _FP16_ONLY),
    "min_loss_scale": (NUMBER, _FP16_ONLY),
    "loss_scale_window": (NUMBER, _FP16_ONLY),
    "hysteresis": (NUMBER, _FP16_ONLY),
    # Bridge's bf16_mixed names tensorwise, although no product is in FP8.
    "fp8_recipe": (_only(None, "tensorwise"), _FP8),
    "reuse_grad_buf_for_mxfp8_param_ag": (OFF, _FP8),
    "use_precision_aware_optimizer": (BOOL, _ELEMENT),
    "store_param_remainders": (BOOL, _ELEMENT),
    "main_grads_dtype": (_only("float32"), _FP32),
    "main_params_dtype": (_only("float32"), _STATES),
    "exp_avg_dtype": (_only("float32", "bfloat16"), _STATES),
    "exp_avg_sq_dtype": (_only("float32", "bfloat16"), _STATES),
    # Of other optimizers: their defaults.
    "muon_momentum": (_only(0.95), _ADAM),
    "muon_split_qkv": (_only(True), _ADAM),
    "muon_nesterov": (OFF, _ADAM),
    "muon_scale_mode": (_only("spectral"), _ADAM),
    "muon_fp32_matmul_prec": (_only("medium"), _ADAM),
    "muon_coefficient_type": (_only("quintic"), _ADAM),
    "muon_num_ns_steps": (_only(5), _ADAM),
    "muon_tp_mode": (_only("blockwise"), _ADAM),
    "muon_extra_scale_factor": (_only(1.0), _ADAM),
    "muon_scalar_optimizer": (_only("adam"), _ADAM),
    "lion_beta1": (_only(0.95), _ADAM),
    "lion_beta2": (_only(0.98), _ADAM),
    "soap_shampoo_beta": (_only(0.95), _ADAM),
    "soap_precondition_frequency": (_only(1), _ADAM),
    "soap_use_kl_shampoo": (_only(True), _ADAM),
    "adaptive_muon_moment2_method": (_only("adamuon"), _ADAM),
    "adaptive_muon_beta2": (_only(0.95), _ADAM),
    "adaptive_muon_eps": (_only(1e-08), _ADAM),
    # Where states lie.
    "use_distributed_optimizer": (BOOL, _ELEMENT),
    "use_layer_wise_distributed_optimizer": (OFF, _ADAM),
    "overlap_param_gather": (BOOL, _WAITS),
    "overlap_param_gather_with_optimizer_step": (OFF, _READ_EARLY),
    "optimizer_cpu_offload": (OFF, _OFFLOAD),
    "optimizer_offload_fraction": (_only(0.0), _OFFLOAD),
    "use_torch_optimizer_for_cpu_offload": (OFF, _OFFLOAD),
    "overlap_cpu_optimizer_d2h_h2d": (OFF, _OFFLOAD),
    "pin_cpu_grads": (BOOL, _BYTES),
    "pin_cpu_params": (BOOL, _BYTES),
    "optimizer_cuda_graph": (OFF, _GRAPH),
    # What is logged.
    "log_num_zeros_in_grad": (BOOL, _READS),
    "barrier_with_L1_time": (BOOL, _READS),
    "timers": (ANY, _READS),
    "config_logger_dir": (ANY, _READS),
}

DDP: dict[str, tuple[Values, str]] = {
    "grad_reduce_in_fp32": (_only(True), _FP32),
    "param_name_patterns_for_fp32_local_accumulation": (_only(()), _FP32),
    "reduce_scatter_with_fp32_accumulation": (OFF, _TREE),
    "average_in_collective": (OFF, "each rank divides its gradient by dp before the sum"),
    "overlap_grad_reduce": (BOOL, _TREE),
    "delay_wgrad_compute": (OFF, _COMPLETE),
    "overlap_param_gather": (BOOL, _WAITS),
    "align_param_gather": (OFF, _READ_EARLY),
    "use_distributed_optimizer": (BOOL, _ELEMENT),
    "num_distributed_optimizer_instances": (_only(1), "several instances reduce gradients in two sums"),
    "bucket_size": (NUMBER, _TREE),
    "num_buckets": (NUMBER, _TREE),
    "pad_buckets_for_high_nccl_busbw": (BOOL, _TREE),
    "check_for_nan_in_grad": (BOOL, _READS),
    "check_for_large_grads": (BOOL, _READS),
    "nccl_ub": (OFF, _SWITCH),
    "disable_symmetric_registration": (OFF, _SWITCH),
    "fp8_param_gather": (OFF, _FP8),
    "fp4_param_gather": (OFF, _FP8),
    "reuse_grad_buf_for_mxfp8_param_ag": (OFF, _FP8),
    "keep_fp8_transpose_cache": (OFF, _FP8),
    # Of FSDP: their defaults.
    "use_megatron_fsdp": (OFF, _FSDP),
    "use_custom_fsdp": (OFF, _FSDP),
    "data_parallel_sharding_strategy": (_only("no_shard"), _FSDP),
    "outer_dp_sharding_strategy": (_only("no_shard"), _FSDP),
    "gradient_reduce_div_fusion": (_only(True), _FSDP),
    "suggested_communication_unit_size": (_only(None), _FSDP),
    "fsdp_double_buffer": (OFF, _FSDP),
    "fsdp_db_use_persist_buf_on_alloc_fail": (OFF, _FSDP),
    "fsdp_all_gather_in_start_param_sync": (_only(True), _FSDP),
    "fsdp_manual_registration": (OFF, _FSDP),
    "megatron_fsdp_main_params_dtype": (_only("float32"), _FSDP),
    "megatron_fsdp_main_grads_dtype": (_only(None), _FSDP),
    "megatron_fsdp_grad_comm_dtype": (_only(None), _FSDP),
    "megatron_fsdp_use_decoupled_grad": (OFF, _FSDP),
    "megatron_fsdp_cuda_graph_mode": (OFF, _FSDP),
    "megatron_fsdp_enable_fine_grained_param_gather": (OFF, _FSDP),
    "megatron_fsdp_max_pool_double_buffer": (OFF, _FSDP),
}

DIST: dict[str, tuple[Values, str]] = {
    "distributed_backend": (_only("nccl", "gloo"), "the sums of other backends are not covered"),
    "use_gloo_process_groups": (BOOL, _BYTES),
    "align_grad_reduce": (BOOL, _BYTES),
    "use_megatron_fsdp": (OFF, _FSDP),
    "use_torch_fsdp2": (OFF, _FSDP),
    "use_sharp": (OFF, _SWITCH),
    "sharp_enabled_group": (_only(None), _SWITCH),
    "nccl_communicator_config_path": (_only(None), "the file may choose how NCCL adds"),
    "use_tp_pp_dp_mapping": (OFF, "the owner of an expert follows from Megatron's default order of ranks"),
    "use_decentralized_pg": (OFF, "the invariant layers take their groups from Megatron's parallel state"),
    "eval_context_parallel_size": (_only(None), "evaluation has the context parallelism of training"),
    "enable_megatron_core_experimental": (OFF, "experimental layers have no invariant version"),
    "disable_jit_fuser": (BOOL, "fused functions compute every element alone"),
    "external_gpu_device_mapping": (BOOL, _PLACE),
    "local_rank": (ANY, _PLACE),
    "lazy_mpu_init": (OFF, "each rank sets up its groups before it builds its layers"),
    "high_priority_stream_groups": (ANY, _TIME),
    "distributed_timeout_minutes": (ANY, _TIME),
    "distributed_timeout_seconds_after_init": (ANY, _TIME),
    "flight_recorder_dump_path": (ANY, _READS),
    "flight_recorder_trace_buffer_size": (ANY, _READS),
    "flight_recorder_dump_on_timeout": (ANY, _READS),
    "flight_recorder_include_stack_trace": (ANY, _READS),
    "flight_recorder_include_only_active": (ANY, _READS),
    "flight_recorder_extra_dump_on_exec": (ANY, _READS),
}

SECTIONS = {"optimizer": OPTIMIZER, "ddp": DDP, "dist": DIST}


def values_of(config: Any) -> dict[str, Any]:
    """The fields of an object of Megatron-Core's: name -> value."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def refused(section: str, given: Mapping[str, Any]) -> list[str]:
    """One line for every field whose value is not allowed: the reason, and the values that are.

    section: one of SECTIONS. given: name -> value, as a composed tree or an object of Megatron-Core has it.
    """
    lines = []
    for name, value in given.items():
        key = f"{section}.{name}"
        # Without a row nobody has read what the field does.
        values, why = SECTIONS[section].get(name, (NONE, "the invariant numerics do not know this field"))
        if not values.accepts(value):
            lines.append(f"{key}={_as_text(value)}: {why}; {values.remedy.format(key=key)}")
    return lines
