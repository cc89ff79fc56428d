"""What packed sequences need under invariant numerics."""

import pytest

from tp_invariant_recipes.check.invariant.packed import uneven
from tp_invariant_recipes.config.compose import compose


@pytest.mark.parametrize("shards, multiple, refused", ((1, 1, True), (1, 2, False), (4, 6, True), (4, 8, False)))
def test_each_packed_sequence_has_a_multiple_of_the_shards_and_at_least_two_tokens(shards, multiple, refused):
    config = compose("qwen3_toy", [f"numerics.virtual_shards={shards}"], device="cpu").config
    assert uneven(config, {"pad_seq_to_mult": multiple}) is refused
