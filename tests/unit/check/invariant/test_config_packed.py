"""What packed sequences need under invariant numerics."""

import pytest

from tests.trees import with_fields
from tests.unit.check.invariant.test_config_delta_net import PACKED
from tp_invariant_recipes.check.invariant.training import PACKED_LIMITS as LIMITS
from tp_invariant_recipes.check.invariant.training import PADDED, uneven
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import compose


@pytest.mark.parametrize("shards, multiple, refused", ((1, 1, True), (1, 2, False), (4, 6, True), (4, 8, False)))
def test_each_packed_sequence_has_a_multiple_of_the_shards_and_at_least_two_tokens(shards, multiple, refused):
    config = compose("qwen3_toy", [f"numerics.virtual_shards={shards}"], device="cpu").config
    assert uneven(config, {"pad_seq_to_mult": multiple}) is refused


@pytest.mark.parametrize(
    "words, multiple, fits",
    (("", 6, 24), ("numerics.virtual_shards=4", None, 4), ("precision=fp8_tensorwise", 64, 128)),
)
def test_the_message_names_the_value_and_one_that_fits(words, multiple, fits):
    config = compose("qwen3_toy", [*words.split(), "seq=1024"], device="cpu").config
    specs = {"packed_sequence_size": 1024, "pad_seq_to_mult": multiple}
    config = with_fields(config, **PACKED | {"dataset__offline_packing_specs": specs})
    (problem,) = (p for p in broken_rules(config, LIMITS) if PADDED in p.key)
    assert problem.key == f"numerics=tree: {PADDED}={'null' if multiple is None else multiple}"
    assert problem.solve == f"{PADDED}={fits}"
