"""Adapters (LoRA). check/adapters.py and check/invariant/lora.py have rules for most of these."""

from tp_invariant_recipes.fields.field import ANY, OFF, row, section
from tp_invariant_recipes.fields.ranges import COUNT, SHARE

_OTHER_RULE = "another rule says which values, under any numerics"

PEFT = section(
    row(ANY, "target_modules exclude_modules canonical_mapping alpha dropout_position "
        "sequence_parallel_input_regather lora_A_init_method lora_B_init_method a2a_experimental lora_dtype",
        _OTHER_RULE),
    row(ANY, "dim", _OTHER_RULE, COUNT),
    row(ANY, "dropout", _OTHER_RULE, SHARE),
    row(ANY, "share_expert_adapters", "each kind is covered (numerics/megatron/adapters/expert_lora.py)"),
    row(OFF, "normalize_moe_lora", "experts with fewer features than the other layers are not covered"),
    row(OFF, "experts_shared_outer_loras", "adapters with one matrix for all experts and one for each are not covered"),
)  # fmt: skip
