"""The values that the invariant numerics allow for fields of Bridge's sections, but for `model` (`model_fields.py`).

A group has the values of its fields and the reason. tpi refuses every other value, and every field in no group. A
section that needs what tpi does not start (nvidia-resiliency-ext, NVIDIA DLFw Inspect) has its switch off.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

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
    Values,
    as_text,
    only,
    rows,
)
from tp_invariant_recipes.settings.schema import PROVIDER
from tp_invariant_recipes.settings.sections import OWN_KEYS

ON = only(True)
NULL = only(None)

_ELEMENT = "the optimizer computes every element alone"
_NORM = "the gradient norm is one number for all ranks"
_KNOWN = "only Adam, SGD and Muon have invariant versions"
_MUON = "Muon's matrices are whole in every layout"
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
_RULED = "another rule says which values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_IDLE = "it is read with a field that is off"
_DIGEST = "a digest of the data says what is in it"
_SEQUENCE = "it says what is in a sequence, whoever computes it"
_IDS = "it says how text becomes token ids, before a sequence is cut"
_SCHEDULE = "one number a step, from the step's number"
_STEP = "a step has gbs sequences in every layout"
_STEPS = "tpi counts steps, not samples"
_RANKS = "all ranks must agree whether a step counts"
_HYBRID = "hybrid context parallelism is not covered"
_CACHE = "a new run has no index of its data yet"
_PADDING = "Megatron pads the vocabulary to a multiple of tp, and model.vocab_size decides it"
_RESUMED = "a run could not be resumed"
_LOCAL = "--resume knows the checkpoints in run.dir only"
_EXPORT = "tpi export writes a Hugging Face checkpoint"
_OVERLAP = "overlapped collectives add in an order of their own"
_OF_TPI = "tpi starts and watches the ranks itself"

OPTIMIZER = rows(
    (only("adam", "sgd", "muon"), _KNOWN, "optimizer"),
    (NUMBER, _ELEMENT, "lr min_lr decoupled_lr decoupled_min_lr weight_decay adam_beta1 adam_beta2 adam_eps "
     "sgd_momentum"),
    (BOOL, _ELEMENT, "apply_wd_to_qk_layernorm decoupled_weight_decay bf16 use_precision_aware_optimizer "
     "store_param_remainders use_distributed_optimizer"),
    (NUMBER, _NORM, "clip_grad"),
    (THRESHOLD, _NORM, "grad_norm_skip_threshold"),
    (only("bfloat16", "float32"), _FP16, "params_dtype"),
    (OFF, _FP16, "fp16"),
    (NULL, _FP16, "loss_scale"),
    (NUMBER, _FP16_ONLY, "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
    # Bridge's bf16_mixed names tensorwise, although no product is in FP8.
    (only(None, "tensorwise"), _FP8, "fp8_recipe"),
    (OFF, _FP8, "reuse_grad_buf_for_mxfp8_param_ag"),
    (only("float32"), _FP32, "main_grads_dtype"),
    (only("float32"), _STATES, "main_params_dtype"),
    (only("float32", "bfloat16"), _STATES, "exp_avg_dtype exp_avg_sq_dtype"),
    # coverage/muon.py has what Muon must have of these, and what others must not set.
    (NUMBER, _MUON, "muon_momentum muon_num_ns_steps muon_extra_scale_factor"),
    (BOOL, _MUON, "muon_nesterov muon_split_qkv use_layer_wise_distributed_optimizer"),
    (only("spectral", "shape_scaling", "unit_rms_norm"), _MUON, "muon_scale_mode"),
    (only("highest", "high", "medium"), _MUON, "muon_fp32_matmul_prec"),
    (only("quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"), _MUON, "muon_coefficient_type"),
    (only("blockwise", "duplicated"), _MUON, "muon_tp_mode"),
    (only("adam"), _KNOWN, "muon_scalar_optimizer"),
    (only(0.95), _KNOWN, "lion_beta1 soap_shampoo_beta adaptive_muon_beta2"),
    (ON, _KNOWN, "soap_use_kl_shampoo"),
    (only(0.98), _KNOWN, "lion_beta2"),
    (only(1), _KNOWN, "soap_precondition_frequency"),
    (only("adamuon"), _KNOWN, "adaptive_muon_moment2_method"),
    (only(1e-08), _KNOWN, "adaptive_muon_eps"),
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
    (ON, _FP32, "grad_reduce_in_fp32"),
    (only(()), _FP32, "param_name_patterns_for_fp32_local_accumulation"),
    (OFF, _TREE, "reduce_scatter_with_fp32_accumulation"),
    (OFF, "each rank divides its gradient by dp before the sum", "average_in_collective"),
    (BOOL, _TREE, "overlap_grad_reduce pad_buckets_for_high_nccl_busbw"),
    (only(False, None), _COMPLETE, "delay_wgrad_compute"),  # null: from a section comm_overlap
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
    (ON, _FSDP, "gradient_reduce_div_fusion fsdp_all_gather_in_start_param_sync"),
    (NULL, _FSDP, "suggested_communication_unit_size megatron_fsdp_main_grads_dtype "
     "megatron_fsdp_grad_comm_dtype"),
    (only("float32"), _FSDP, "megatron_fsdp_main_params_dtype"),
)  # fmt: skip

DIST = rows(
    (only("nccl", "gloo"), "the sums of other backends are not covered", "distributed_backend"),
    (BOOL, BYTES, "use_gloo_process_groups align_grad_reduce"),
    (OFF, _FSDP, "use_megatron_fsdp use_torch_fsdp2"),
    (OFF, _SWITCH, "use_sharp"),
    (NULL, _SWITCH, "sharp_enabled_group"),
    (NULL, "the file may choose how NCCL adds", "nccl_communicator_config_path"),
    (OFF, "the owner of an expert follows from Megatron's default order of ranks", "use_tp_pp_dp_mapping"),
    (OFF, "the invariant layers take their groups from Megatron's parallel state", "use_decentralized_pg"),
    (NULL, "evaluation has the context parallelism of training", "eval_context_parallel_size"),
    (OFF, "experimental layers have no invariant version", "enable_megatron_core_experimental"),
    (BOOL, "fused functions compute every element alone", "disable_jit_fuser"),
    (BOOL, PLACE, "external_gpu_device_mapping"),
    (ANY, PLACE, "local_rank"),
    (OFF, "each rank sets up its groups before it builds its layers", "lazy_mpu_init"),
    (ANY, TIME, "high_priority_stream_groups distributed_timeout_minutes distributed_timeout_seconds_after_init"),
    (ANY, READS, "flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout "
     "flight_recorder_include_stack_trace flight_recorder_include_only_active flight_recorder_extra_dump_on_exec"),
)  # fmt: skip

TRAIN = rows(
    (NUMBER, _STEP, "micro_batch_size global_batch_size train_iters"),
    (ANY, _RULED, "rampup_batch_size step_batch_size_schedule train_samples num_epochs iterations_to_skip skip_train"),
    (OFF, _STEP, "decrease_batch_size_if_needed"),
    (NULL, "it has moved to the section validation", "eval_iters eval_interval"),
    (ON, _RANKS, "check_optimizer_step_success"),
    (OFF, _RANKS, "skip_sync_grad_norm_across_mp"),
    (only("SIGTERM"), "the launcher stops a run with SIGTERM", "exit_signal"),
    (OFF, "a rank that is stopped ends its data workers", "exit_signal_handler_for_dataloader"),
    (OFF, _UNREAD, "exit_signal_handler_for_training"),
    (NULL, _UNREAD, "gpu_sniff_test_interval"),
    (ANY, READS, "check_weight_hash_across_dp_replicas_interval"),
    (ANY, TIME, "empty_unused_memory_level train_sync_interval exit_interval exit_duration_in_mins exit_signal_handler "
     "manual_gc manual_gc_interval manual_gc_eval"),
)  # fmt: skip

SCHEDULER = rows(
    (ANY, _SCHEDULE, "lr_decay_style lr_decay_iters lr_wsd_decay_style lr_wsd_decay_iters lr_warmup_fraction "
     "lr_warmup_iters lr_warmup_init start_weight_decay end_weight_decay weight_decay_incr_style max_steps"),
    (BOOL, _SCHEDULE, "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"),
    (NULL, _STEPS, "lr_decay_samples lr_wsd_decay_samples"),
    (only(0), _STEPS, "lr_warmup_samples"),
    (NULL, _UNREAD, "no_weight_decay_cond_type"),
)  # fmt: skip

# Of GPTDatasetConfig and of GPTSFTDatasetConfig.
DATASET = rows(
    (ANY, _DIGEST, "blend blend_per_split data_path dataset_root"),
    (ANY, _SEQUENCE, "split preprocessing dataset_kwargs max_train_samples mid_level_dataset_surplus tokenizer "
     "random_seed seed sequence_length seq_length"),
    (BOOL, _SEQUENCE, "eod_mask_loss create_attention_mask add_extra_token_to_sequence "
     "drop_last_partial_validation_sequence allow_ambiguous_pad_tokens do_validation do_test"),
    (ANY, _RULED, "dataloader_type reset_attention_mask enable_offline_packing offline_packing_specs hf_dataset "
     "hf_validation_dataset hf_test_dataset hf_output_root hf_validation_proportion hf_rewrite"),
    (ANY, PLACE, "path_to_cache"),
    (NUMBER, BYTES, "num_workers num_dataset_builder_threads memmap_workers"),
    (BOOL, BYTES, "pin_memory persistent_workers mmap_bin_files"),
    (ON, "a step of fewer examples has other data shards", "drop_last"),
    (ON, "which sequences a rank computes depends on dp", "data_sharding"),
    (OFF, "rotary positions go through a whole sequence", "reset_position_ids"),
    (OFF, "packed sequences are not covered", "inter_document_masking"),
    (only(None, False), "one set of sequences is validated", "multiple_validation_sets full_validation"),
    (OFF, _HYBRID, "hybrid_context_parallel"),
    (only(1), _HYBRID, "data_parallel_size"),
    (only(0), _HYBRID, "sequence_parallel_size"),
    (NULL, _HYBRID, "context_parallel_size"),
    (OFF, _CACHE, "fast_cache_load defer_npy_index_mmap"),
    (NULL, _CACHE, "sequences_per_dataset per_dataset_sequences_path object_storage_cache_path"),
    (NULL, "no data that tpi reads needs it", "dataloader_save dataloader_load trust_remote_code"),
)  # fmt: skip

TOKENIZER = rows(
    (ANY, _IDS, "vocab_size tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens "
     "tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy "
     "tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens "
     "trust_remote_code null_tokenizer_eod_id null_tokenizer_pad_id chat_template chat_template_path "
     "hf_tokenizer_kwargs sp_tokenizer_kwargs"),
    (BOOL, READS, "pad_vocab_size"),
    (OFF, _PADDING, "use_tokenizer_vocab_size"),
    (NULL, _PADDING, "padded_vocab_size"),
    (only(1), _PADDING, "make_vocab_size_divisible_by tensor_model_parallel_size"),
    (only(0), _PADDING, "rank"),
    (only(0), _UNREAD, "vocab_extra_ids"),
    (NULL, "images are not covered", "tokenizer_prompt_format image_tag_type"),
    (OFF, "images are not covered", "force_system_message"),
)  # fmt: skip

CHECKPOINT = rows(
    (ANY, _RULED, "save load ckpt_step pretrained_checkpoint load_optim load_rng finetune "
     "dist_ckpt_optim_fully_reshardable"),
    (BOOL, TIME, "async_save"),
    (ANY, TIME, "save_interval most_recent_k exit_on_missing_checkpoint async_strategy "
     "use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority async_write_results_mp_mode"),
    (ANY, BYTES, "fully_parallel_save fully_parallel_load ckpt_assume_constant_structure save_tokenizer_assets "
     "distrib_optim_fully_reshardable_mem_efficient storage_writers_per_rank dist_ckpt_workers"),
    (only("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"), _RESUMED,
     "dist_ckpt_strictness"),
    (only("torch_dist"), _RESUMED, "ckpt_format"),
    (ON, _RESUMED, "save_optim save_rng"),
    (OFF, _RESUMED, "load_main_params_from_ckpt strict_fsdp_dtensor_load"),
    (NULL, _LOCAL, "non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir "
     "non_persistent_local_ckpt_dir replication_jump custom_manager_class"),
    (only("fully_parallel"), _LOCAL, "non_persistent_local_ckpt_algo"),
    (OFF, _LOCAL, "replication"),
    (only(2), _LOCAL, "replication_factor"),
    (OFF, _EXPORT, "also_save_hf_checkpoint hf_trust_remote_code hf_distributed_save"),
    (NULL, _EXPORT, "hf_source_path"),
    (only(1), _EXPORT, "hf_save_every_n_ranks"),
    (NULL, _UNREAD, "save_params_interval save_activations_interval save_tokens_per_expert_interval "
     "save_wgrads_interval save_dgrads_interval save_retain_interval ckpt_convert_format ckpt_convert_save"),
    (OFF, _UNREAD, "use_checkpoint_args use_mp_args_from_checkpoint_args auto_detect_ckpt_format verify_integrity "
     "ckpt_convert_update_legacy_dist_opt_format async_ckpt_use_cpu_shm dist_ckpt_save_pre_mcore_014"),
    (ON, _UNREAD, "use_tokenizer_model_from_checkpoint_args ckpt_load_validate_sharding_integrity stream_ckpt_dequant"),
    (only("broadcast"), _UNREAD, "ckpt_fully_parallel_load_exchange_algo"),
    (only("dp"), _UNREAD, "ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group"),
)  # fmt: skip

VALIDATION = rows(
    (NUMBER, _STEP, "eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size"),
    (ANY, _RULED, "skip_train"),
    (OFF, "one set of sequences is validated", "full_validation multiple_validation_sets"),
    (NULL, _UNREAD, "validation_set_names"),
    (OFF, _UNREAD, "test_mode"),
)  # fmt: skip

LOGGER = rows(
    (ANY, READS, "log_interval log_params_norm log_throughput log_throughput_to_tensorboard throughput_window_size "
     "log_progress timing_log_level timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size "
     "log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard "
     "log_memory_to_tensorboard memory_keys log_l2_norm_grad_to_tensorboard log_num_zeros_in_grad "
     "log_max_attention_logit log_runtime_to_tensorboard runtime_time_unit barrier_with_L1_time "
     "log_world_size_to_tensorboard wandb_project wandb_exp_name wandb_save_dir wandb_entity logging_level "
     "filter_warnings modules_to_filter set_level_for_all_loggers log_energy save_config_filepath "
     "skip_train_metrics_log mlflow_experiment mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description "
     "mlflow_log_artifacts comet_project comet_experiment_name comet_workspace comet_api_key comet_tags"),
    (NULL, _UNREAD, "log_memory_interval moe_routing_trace_path moe_routing_trace_max_training_iters"),
    (OFF, _UNREAD, "log_device_memory_used moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
     "moe_routing_trace_dump_weights"),
)  # fmt: skip

RNG = rows(
    (NUMBER, "all ranks draw from it", "seed"),
    (BOOL, "it only decides who draws", "te_rng_tracker"),
    (OFF, "every data-parallel rank would draw other weights", "data_parallel_random_init"),
    (OFF, "a run trains", "inference_rng_tracker"),
)  # fmt: skip

RERUN_STATE_MACHINE = rows(
    (only(0), "an injected error is no result", "error_injection_rate"),
    (ANY, _IDLE, "error_injection_type"),
    (only("disabled"), "a step that is computed again would be recorded twice", "rerun_mode"),
    (ANY, READS, "check_for_nan_in_loss check_for_spiky_loss spiky_loss_factor"),
)  # fmt: skip

PROFILING = rows(
    (ANY, READS, "use_nsys_profiler profile_step_start profile_step_end use_pytorch_profiler "
     "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks "
     "record_memory_history memory_snapshot_path record_shapes nvtx_ranges"),
)  # fmt: skip

STRAGGLER = rows(
    (ANY, READS, "log_straggler straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup"),
    (ON, _UNREAD, "enable_straggler_on_startup"),
)  # fmt: skip

NVRX_STRAGGLER = rows(
    (OFF, _OF_TPI, "enabled"),
    (ANY, _IDLE, "report_time_interval calc_relative_gpu_perf calc_individual_gpu_perf num_gpu_perf_scores_to_print "
     "gpu_relative_perf_threshold gpu_individual_perf_threshold stop_if_detected enable_logging profiling_interval "
     "logger_name"),
)  # fmt: skip

FT = rows(
    (OFF, _OF_TPI, "enable_ft_package calc_ft_timeouts simulate_fault"),
    (ANY, _IDLE, "simulated_fault_type simulated_fault_rank simulated_fault_base_delay"),
)  # fmt: skip

INPROCESS_RESTART = rows(
    (OFF, _OF_TPI, "enabled"),
    (ANY, _IDLE, "max_iterations monitor_thread_interval monitor_process_interval progress_watchdog_interval "
     "heartbeat_interval soft_timeout hard_timeout heartbeat_timeout barrier_timeout completion_timeout last_call_wait "
     "termination_grace_time granularity active_world_size empty_cuda_cache max_rank_faults monitor_process_logdir"),
)  # fmt: skip

TENSOR_INSPECT = rows(
    (OFF, "what it inspects it may compute otherwise", "enabled"),
    (ANY, _IDLE, "features feature_dirs allow_custom_feature_dirs log_dir init_training_step"),
)  # fmt: skip

# coverage/lora.py has rules for most of these.
PEFT = rows(
    (ANY, _RULED, "target_modules exclude_modules canonical_mapping dim alpha dropout dropout_position "
     "sequence_parallel_input_regather lora_A_init_method lora_B_init_method a2a_experimental lora_dtype"),
    (ANY, "each kind is covered (numerics/megatron/expert_adapters.py)", "share_expert_adapters"),
    (OFF, "experts with fewer features than the other layers are not covered", "normalize_moe_lora"),
    (OFF, "adapters with one matrix for all experts and one for each are not covered", "experts_shared_outer_loras"),
)  # fmt: skip

# Where the section is null, Bridge decides by the layout.
COMM_OVERLAP = rows(
    (OFF, _OVERLAP, "tp_comm_overlap"),
    (Values(lambda value: not value, "{key}=null"), _OVERLAP, "tp_comm_overlap_cfg overlap_p2p_comm batch_p2p_comm "
     "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather bucket_size "
     "defer_embedding_wgrad_compute wgrad_deferral_limit overlap_moe_expert_parallel_comm delay_wgrad_compute"),
    (ANY, _IDLE, "tp_comm_bootstrap_backend data_parallel_size"),
)  # fmt: skip

SECTIONS: dict[str, Rows] = {
    "optimizer": OPTIMIZER,
    "ddp": DDP,
    "dist": DIST,
    "train": TRAIN,
    "scheduler": SCHEDULER,
    "dataset": DATASET,
    "tokenizer": TOKENIZER,
    "checkpoint": CHECKPOINT,
    "validation": VALIDATION,
    "logger": LOGGER,
    "rng": RNG,
    "rerun_state_machine": RERUN_STATE_MACHINE,
    "profiling": PROFILING,
    "straggler": STRAGGLER,
    "nvrx_straggler": NVRX_STRAGGLER,
    "ft": FT,
    "inprocess_restart": INPROCESS_RESTART,
    "tensor_inspect": TENSOR_INSPECT,
    "peft": PEFT,
    "comm_overlap": COMM_OVERLAP,
}


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
