"""Checkpoints."""

from tp_invariant_recipes.fields.field import ANY, BOOL, BYTES, NULL, OFF, ON, TIME, only, row, section
from tp_invariant_recipes.fields.ranges import COUNT, NICE, SIGNED

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
