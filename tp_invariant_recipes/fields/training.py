"""Steps, validation, random numbers; checkpoints; ranks and their collectives; and what watches a run."""

from tp_invariant_recipes.fields.field import (
    ANY,
    BOOL,
    BYTES,
    NULL,
    NUMBER,
    OFF,
    ON,
    PLACE,
    READS,
    TIME,
    BridgeField,
    Values,
    only,
    row,
    section,
)
from tp_invariant_recipes.fields.ranges import COUNT, NICE, PORT, POSITIVE, SHARE, SIGNED

# Steps, validation, and random numbers.

_OTHER_RULE = "another rule says which values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_STEP = "a step has gbs sequences in every layout"
_RANKS = "all ranks must agree whether a step counts"

TRAIN = section(
    row(NUMBER, "~micro_batch_size global_batch_size ~train_iters", _STEP),
    row(ANY, "rampup_batch_size step_batch_size_schedule iterations_to_skip skip_train", _OTHER_RULE),
    row(ANY, "train_samples", _OTHER_RULE, COUNT),
    row(ANY, "num_epochs", _OTHER_RULE, POSITIVE),
    row(OFF, "decrease_batch_size_if_needed", _STEP),
    row(NULL, "eval_iters eval_interval", "it has moved to the section validation", adjust_to=None),
    row(ON, "check_optimizer_step_success", _RANKS, adjust_to=True),
    row(OFF, "skip_sync_grad_norm_across_mp", _RANKS),
    row(only("SIGTERM"), "exit_signal", "the launcher stops a run with SIGTERM"),
    row(OFF, "exit_signal_handler_for_dataloader", "a rank that is stopped ends its data workers"),
    row(OFF, "exit_signal_handler_for_training", _UNREAD),
    row(NULL, "gpu_sniff_test_interval", _UNREAD),
    row(ANY, "check_weight_hash_across_dp_replicas_interval", READS, COUNT),
    row(ANY, "empty_unused_memory_level train_sync_interval exit_signal_handler manual_gc manual_gc_interval "
        "manual_gc_eval", TIME),
    row(ANY, "exit_interval exit_duration_in_mins", TIME, COUNT),
)  # fmt: skip

VALIDATION = section(
    row(NUMBER, "eval_iters start_eval_at_iter", _STEP),
    row(NUMBER, "eval_interval eval_global_batch_size eval_micro_batch_size", _STEP, COUNT),
    row(ANY, "skip_train", _OTHER_RULE),
    row(OFF, "full_validation multiple_validation_sets", "one set of sequences is validated"),
    row(NULL, "validation_set_names", _UNREAD),
    row(OFF, "test_mode", _UNREAD),
)  # fmt: skip

RNG = section(
    row(NUMBER, "seed", "all ranks draw from it"),
    row(BOOL, "~te_rng_tracker", "it only decides who draws"),
    row(OFF, "data_parallel_random_init", "every data-parallel rank would draw other weights"),
    row(OFF, "inference_rng_tracker", "a run trains"),
)  # fmt: skip


# Checkpoints.

_OTHER_RULE = "another rule says which values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_RESUMED = "a run could not be resumed"
_LOCAL = "--resume knows the checkpoints in run.dir only"
_EXPORT = "tpi export writes a Hugging Face checkpoint"

CHECKPOINT = section(
    row(ANY, "save load ckpt_step pretrained_checkpoint load_optim load_rng finetune "
        "dist_ckpt_optim_fully_reshardable", _OTHER_RULE),
    row(BOOL, "async_save", TIME),
    row(ANY, "save_interval exit_on_missing_checkpoint async_strategy use_persistent_ckpt_worker "
        "async_ckpt_io_priority async_write_results_mp_mode", TIME),
    row(ANY, "most_recent_k", TIME, SIGNED),
    row(ANY, "async_ckpt_cpu_priority", TIME, NICE),
    row(ANY, "fully_parallel_save fully_parallel_load ckpt_assume_constant_structure save_tokenizer_assets "
        "distrib_optim_fully_reshardable_mem_efficient", BYTES),
    row(ANY, "storage_writers_per_rank dist_ckpt_workers", BYTES, COUNT),
    row(only("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"), ""
        "dist_ckpt_strictness", _RESUMED),
    row(only("torch_dist"), "ckpt_format", _RESUMED, adjust_to="torch_dist"),
    row(ON, "save_optim save_rng", _RESUMED, adjust_to=True),
    row(OFF, "load_main_params_from_ckpt strict_fsdp_dtensor_load", _RESUMED),
    row(NULL, "non_persistent_save_interval replication_jump", _LOCAL, COUNT),
    row(NULL, "non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir "
        "custom_manager_class", _LOCAL),
    row(only("fully_parallel"), "non_persistent_local_ckpt_algo", _LOCAL),
    row(OFF, "replication", _LOCAL),
    row(only(2), "replication_factor", _LOCAL, COUNT),
    row(OFF, "also_save_hf_checkpoint", _EXPORT, adjust_to=False),
    row(OFF, "hf_trust_remote_code hf_distributed_save", _EXPORT),
    row(NULL, "hf_source_path", _EXPORT),
    row(only(1), "hf_save_every_n_ranks", _EXPORT, COUNT),
    row(NULL, "save_params_interval save_activations_interval save_tokens_per_expert_interval save_wgrads_interval "
        "save_dgrads_interval save_retain_interval", _UNREAD, COUNT),
    row(NULL, "ckpt_convert_format ckpt_convert_save", _UNREAD),
    row(OFF, "use_checkpoint_args use_mp_args_from_checkpoint_args auto_detect_ckpt_format verify_integrity "
        "ckpt_convert_update_legacy_dist_opt_format async_ckpt_use_cpu_shm dist_ckpt_save_pre_mcore_014", _UNREAD),
    row(ON, "use_tokenizer_model_from_checkpoint_args ckpt_load_validate_sharding_integrity stream_ckpt_dequant",
        _UNREAD),
    row(only("broadcast"), "ckpt_fully_parallel_load_exchange_algo", _UNREAD),
    row(only("dp"), "ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group", _UNREAD),
)  # fmt: skip


# Ranks and their collectives.

_SWITCH = "sums inside a switch (NVLS, SHARP) have an order of their own"
_FSDP = "FSDP reduces gradients in an order of its own"
_SWITCHED_OFF = "it is read with a field that is off"
_OVERLAP = "overlapped collectives add in an order of their own"

DIST = section(
    row(only("nccl", "gloo"), "distributed_backend", "the sums of other backends are not covered"),
    row(BOOL, "use_gloo_process_groups align_grad_reduce", BYTES),
    row(OFF, "use_megatron_fsdp", _FSDP, adjust_to=False),
    row(OFF, "use_torch_fsdp2", _FSDP),
    row(OFF, "use_sharp", _SWITCH, adjust_to=False),
    row(NULL, "sharp_enabled_group", _SWITCH, adjust_to=None),
    row(NULL, "nccl_communicator_config_path", "the file may choose how NCCL adds", adjust_to=None),
    row(OFF, "use_tp_pp_dp_mapping",
        "the owner of an expert follows from Megatron's default order of ranks", adjust_to=False),
    row(OFF, "use_decentralized_pg",
        "the invariant layers take their groups from Megatron's parallel state", adjust_to=False),
    row(NULL, "eval_context_parallel_size", "evaluation has the context parallelism of training", COUNT),
    row(OFF, "enable_megatron_core_experimental", "experimental layers have no invariant version", adjust_to=False),
    row(BOOL, "disable_jit_fuser", "fused functions compute every element alone"),
    row(BOOL, "external_gpu_device_mapping", PLACE),
    row(ANY, "local_rank", PLACE),
    row(OFF, "lazy_mpu_init", "each rank sets up its groups before it builds its layers", adjust_to=False),
    row(ANY, "high_priority_stream_groups", TIME),
    row(ANY, "distributed_timeout_minutes distributed_timeout_seconds_after_init", TIME, COUNT),
    row(ANY, "flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout "
        "flight_recorder_include_stack_trace flight_recorder_include_only_active "
        "flight_recorder_extra_dump_on_exec", READS),
)  # fmt: skip

# Where the section is null, Bridge decides by the layout.
COMM_OVERLAP = section(
    row(OFF, "tp_comm_overlap", _OVERLAP, adjust_to=False),
    row(Values(lambda value: not value, "{key}=null"), "tp_comm_overlap_cfg overlap_p2p_comm batch_p2p_comm "
        "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather "
        "bucket_size defer_embedding_wgrad_compute wgrad_deferral_limit overlap_moe_expert_parallel_comm "
        "delay_wgrad_compute", _OVERLAP, adjust_to=None),
    row(ANY, "tp_comm_bootstrap_backend data_parallel_size", _SWITCHED_OFF),
)  # fmt: skip


# What watches a run, or starts it again.

_UNREAD = "Megatron-Bridge does not read it"
_SWITCHED_OFF = "it is read with a field that is off"
_OF_TPI = "tpi starts and watches the ranks itself"

LOGGER = section(
    row(ANY, "log_interval throughput_window_size tensorboard_log_interval tensorboard_queue_size", READS, COUNT),
    row(NULL, "log_memory_interval", _UNREAD, COUNT),
    row(NULL, "moe_routing_trace_path moe_routing_trace_max_training_iters", _UNREAD),
    row(OFF, "log_device_memory_used moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states "
        "moe_routing_trace_dump_weights", _UNREAD),
    otherwise=BridgeField(ANY, READS),
)  # fmt: skip

PROFILING = section(otherwise=BridgeField(ANY, READS))

STRAGGLER = section(
    row(ANY, "straggler_ctrlr_port", READS, PORT),
    row(ON, "enable_straggler_on_startup", _UNREAD),
    otherwise=BridgeField(ANY, READS),
)  # fmt: skip

NVRX_STRAGGLER = section(
    row(OFF, "enabled", _OF_TPI),
    row(ANY, "report_time_interval", _SWITCHED_OFF, POSITIVE),
    row(ANY, "num_gpu_perf_scores_to_print profiling_interval", _SWITCHED_OFF, COUNT),
    row(ANY, "gpu_relative_perf_threshold gpu_individual_perf_threshold", _SWITCHED_OFF, SHARE),
    otherwise=BridgeField(ANY, _SWITCHED_OFF),
)  # fmt: skip

FT = section(
    row(OFF, "enable_ft_package calc_ft_timeouts simulate_fault", _OF_TPI),
    otherwise=BridgeField(ANY, _SWITCHED_OFF),
)  # fmt: skip

INPROCESS_RESTART = section(
    row(OFF, "enabled", _OF_TPI),
    otherwise=BridgeField(ANY, _SWITCHED_OFF),
)  # fmt: skip

TENSOR_INSPECT = section(
    row(OFF, "enabled", "what it inspects it may compute otherwise"),
    otherwise=BridgeField(ANY, _SWITCHED_OFF),
)  # fmt: skip

RERUN_STATE_MACHINE = section(
    row(only(0), "error_injection_rate", "an injected error is no result"),
    row(ANY, "error_injection_type", _SWITCHED_OFF),
    row(only("disabled"), "rerun_mode", "a step that is computed again would be recorded twice"),
    row(ANY, "check_for_nan_in_loss check_for_spiky_loss", READS),
    row(ANY, "spiky_loss_factor", READS, POSITIVE),
)  # fmt: skip
