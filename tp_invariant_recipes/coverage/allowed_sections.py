"""The values that the invariant numerics allow for the fields of Bridge's other sections, in groups of one reason.

A section that needs what tpi does not start (nvidia-resiliency-ext, NVIDIA DLFw Inspect) has its switch off.
"""

from tp_invariant_recipes.coverage.allowed_values import (
    ANY,
    BOOL,
    BYTES,
    NUMBER,
    OFF,
    PLACE,
    READS,
    TIME,
    Rows,
    Values,
    only,
    rows,
)

ON = only(True)
NULL = only(None)

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
    (ANY, _RULED, "save load ckpt_step pretrained_checkpoint load_optim finetune dist_ckpt_optim_fully_reshardable"),
    (ANY, TIME, "save_interval most_recent_k exit_on_missing_checkpoint async_save async_strategy "
     "use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority async_write_results_mp_mode"),
    (ANY, BYTES, "fully_parallel_save fully_parallel_load ckpt_assume_constant_structure save_tokenizer_assets "
     "distrib_optim_fully_reshardable_mem_efficient storage_writers_per_rank dist_ckpt_workers"),
    (only("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"), _RESUMED,
     "dist_ckpt_strictness"),
    (only("torch_dist"), _RESUMED, "ckpt_format"),
    (ON, _RESUMED, "save_optim save_rng load_rng"),
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
    (OFF, "adapters of experts are not covered", "normalize_moe_lora experts_shared_outer_loras"),
    (ON, "adapters of experts are not covered", "share_expert_adapters"),
)  # fmt: skip

# Where the section is null, Bridge decides by the layout.
COMM_OVERLAP = rows(
    (OFF, _OVERLAP, "tp_comm_overlap"),
    (Values(lambda value: not value, "{key}=null"), _OVERLAP, "tp_comm_overlap_cfg overlap_p2p_comm batch_p2p_comm "
     "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather bucket_size "
     "defer_embedding_wgrad_compute wgrad_deferral_limit overlap_moe_expert_parallel_comm delay_wgrad_compute"),
    (ANY, _IDLE, "tp_comm_bootstrap_backend data_parallel_size"),
)  # fmt: skip

OTHERS: dict[str, Rows] = {
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
