"""What watches a run, or starts it again."""

from tp_invariant_recipes.fields.field import ANY, NULL, OFF, ON, READS, BridgeField, only, row, section
from tp_invariant_recipes.fields.ranges import COUNT, PORT, POSITIVE, SHARE

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
