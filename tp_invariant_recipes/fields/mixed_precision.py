"""Numbers of a precision. Its other fields have rules: check/precision.py, check/invariant/fp8.py."""

from tp_invariant_recipes.fields.field import NONE, UNKNOWN, row, section
from tp_invariant_recipes.fields.ranges import COUNT, POSITIVE, SIGNED

MIXED_PRECISION = section(
    row(NONE, "hysteresis fp8_amax_history_len", UNKNOWN, COUNT),
    row(NONE, "loss_scale initial_loss_scale min_loss_scale loss_scale_window", UNKNOWN, POSITIVE),
    row(NONE, "fp8_margin", UNKNOWN, SIGNED),
)
