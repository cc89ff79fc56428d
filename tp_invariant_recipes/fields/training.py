# SPDX-License-Identifier: Apache-2.0
"""Steps, validation, random numbers; checkpoints; ranks and their collectives; and what watches a run."""

from tp_invariant_recipes.fields.field import (
    ANY,
    BOOL,
    BYTES,
    COUNT,
    EMPTY,
    NICE,
    NONE,
    NULL,
    NUMBER,
    OFF,
    ON,
    PLACE,
    PORT,
    POSITIVE,
    READS,
    SHARE,
    SIGNED,
    TIME,
    UNKNOWN,
    BridgeField,
    Values,
    only,
    row,
    section,
)

_OTHER_RULE = "another rule lists the values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_SWITCHED_OFF = "it is read with a field that is off"
_DIGEST = "a digest identifies the data"
_SEQUENCE = "it decides the content of a sequence in every layout"
_IDS = "it decides how text becomes token ids"
_HYBRID = "hybrid context parallelism is not covered"
_CACHE = "a new run has no index of its data yet"
_PADDING = "Megatron pads the vocabulary to a multiple of tp, and model.vocab_size decides it"

# Of GPTDatasetConfig and of GPTSFTDatasetConfig.
DATASET = section(
    row(ANY, "~blend ~blend_per_split data_path ~dataset_root", _DIGEST),
    row(ANY, "split preprocessing dataset_kwargs max_train_samples mid_level_dataset_surplus tokenizer random_seed "
        "seed sequence_length seq_length", _SEQUENCE),
    row(BOOL, "eod_mask_loss ~create_attention_mask add_extra_token_to_sequence "
        "drop_last_partial_validation_sequence allow_ambiguous_pad_tokens do_validation do_test", _SEQUENCE),
    row(ANY, "dataloader_type reset_attention_mask enable_offline_packing offline_packing_specs hf_dataset "
        "hf_validation_dataset hf_test_dataset hf_output_root hf_validation_proportion hf_rewrite", _OTHER_RULE),
    row(ANY, "path_to_cache", PLACE),
    row(NUMBER, "num_workers memmap_workers", BYTES),
    row(NUMBER, "num_dataset_builder_threads", BYTES, COUNT),
    row(BOOL, "pin_memory persistent_workers mmap_bin_files", BYTES),
    row(ON, "drop_last", "a step of fewer examples has other data shards"),
    row(ON, "data_sharding", "which sequences a rank computes depends on dp"),
    row(OFF, "reset_position_ids", "rotary positions go through a whole sequence"),
    row(OFF, "inter_document_masking", "packed sequences are not covered"),
    row(only(None, False), "multiple_validation_sets full_validation", "one set of sequences is validated"),
    row(OFF, "hybrid_context_parallel", _HYBRID),
    row(only(1), "data_parallel_size", _HYBRID, COUNT),
    row(only(0), "sequence_parallel_size", _HYBRID),
    row(NULL, "context_parallel_size", _HYBRID, COUNT),
    row(OFF, "fast_cache_load defer_npy_index_mmap", _CACHE, adjust_to=False),
    row(NULL, "sequences_per_dataset per_dataset_sequences_path object_storage_cache_path", _CACHE),
    row(NULL, "dataloader_save dataloader_load trust_remote_code", "no data that tpi reads needs it"),
    row(NONE, "offline_packing_specs.packed_sequence_size offline_packing_specs.max_single_sequence_length "
        "offline_packing_specs.pad_seq_to_mult", UNKNOWN, COUNT),
    row(NONE, "offline_packing_specs.num_tokenizer_workers", UNKNOWN, SIGNED),
)  # fmt: skip

TOKENIZER = section(
    row(ANY, "vocab_size", _IDS, COUNT),
    row(ANY, "tokenizer_type tokenizer_model vocab_file merge_file metadata_path special_tokens tiktoken_pattern "
        "tiktoken_num_special_tokens tokenizer_sentencepiece_legacy "
        "tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast "
        "tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id chat_template "
        "chat_template_path hf_tokenizer_kwargs sp_tokenizer_kwargs", _IDS),
    row(ANY, "null_tokenizer_pad_id", _IDS, SIGNED),
    row(BOOL, "pad_vocab_size", READS),
    row(OFF, "use_tokenizer_vocab_size", _PADDING),
    row(NULL, "padded_vocab_size", _PADDING, COUNT),
    row(only(1), "make_vocab_size_divisible_by tensor_model_parallel_size", _PADDING, COUNT),
    row(only(0), "rank", _PADDING),
    row(only(0), "vocab_extra_ids", _UNREAD),
    row(NULL, "tokenizer_prompt_format image_tag_type", "images are not covered"),
    row(OFF, "force_system_message", "images are not covered"),
)  # fmt: skip


# Adapters (LoRA). check/finetuning.py and check/invariant/training.py have rules for most of these.

PEFT = section(
    row(ANY, "target_modules alpha dropout_position lora_A_init_method lora_B_init_method", _OTHER_RULE),
    row(ANY, "dim", _OTHER_RULE, COUNT),
    row(only(0.0), "dropout", "dropout of adapters draws other numbers in every layout", SHARE),
    row(EMPTY, "exclude_modules canonical_mapping a2a_experimental "
        "sequence_parallel_input_regather lora_dtype", "it adds other layers or sums"),
    row(ANY, "share_expert_adapters", "each kind is covered (numerics/megatron/expert_lora.py)"),
    row(OFF, "normalize_moe_lora", "experts with fewer features than the other layers are not covered"),
    row(OFF, "experts_shared_outer_loras", "adapters with one matrix for all experts and one for each are not covered"),
)  # fmt: skip


# Steps, validation, and random numbers.

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
    row(only("torch_dist", "fsdp_dtensor"), "~ckpt_format", _RESUMED, adjust_to="torch_dist"),
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
_OVERLAP = "overlapped collectives add in an order of their own"

DIST = section(
    row(only("nccl", "gloo"), "distributed_backend", "the sums of other backends are not covered"),
    row(BOOL, "use_gloo_process_groups align_grad_reduce", BYTES),
    row(BOOL, "~use_megatron_fsdp", "Megatron-FSDP has the sums of DistributedDataParallel"),
    row(OFF, "use_torch_fsdp2", _FSDP),
    row(OFF, "use_sharp", _SWITCH, adjust_to=False),
    row(NULL, "sharp_enabled_group", _SWITCH, adjust_to=None),
    row(NULL, "nccl_communicator_config_path", "the file may choose how NCCL adds", adjust_to=None),
    row(OFF, "use_tp_pp_dp_mapping",
        "the EP rank that hosts an expert follows from Megatron's default order of ranks", adjust_to=False),
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
        "bucket_size defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute", _OVERLAP, adjust_to=None),
    row(ANY, "~overlap_moe_expert_parallel_comm", "layers add in the same order in Megatron's combined schedule"),
    row(ANY, "tp_comm_bootstrap_backend data_parallel_size", _SWITCHED_OFF),
)  # fmt: skip


# What watches a run, or starts it again.

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
