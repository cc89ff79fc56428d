"""Steps, validation, and random numbers."""

from tp_invariant_recipes.fields.field import ANY, BOOL, NULL, NUMBER, OFF, ON, READS, TIME, only, row, section
from tp_invariant_recipes.fields.ranges import COUNT, POSITIVE

_OTHER_RULE = "another rule says which values, under any numerics"
_UNREAD = "Megatron-Bridge does not read it"
_STEP = "a step has gbs sequences in every layout"
_RANKS = "all ranks must agree whether a step counts"

TRAIN = section(
    row(NUMBER, "micro_batch_size global_batch_size train_iters", _STEP),
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
    row(BOOL, "te_rng_tracker", "it only decides who draws"),
    row(OFF, "data_parallel_random_init", "every data-parallel rank would draw other weights"),
    row(OFF, "inference_rng_tracker", "a run trains"),
)  # fmt: skip
