"""Ranks and their collectives."""

from tp_invariant_recipes.fields.field import (
    ANY,
    BOOL,
    BYTES,
    NULL,
    OFF,
    PLACE,
    READS,
    TIME,
    Values,
    only,
    row,
    section,
)
from tp_invariant_recipes.fields.ranges import COUNT

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
