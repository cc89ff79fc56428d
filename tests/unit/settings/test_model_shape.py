"""The shape of a model: Megatron-Core's defaults where a field is unset, and one place that reads each size."""

import pytest

from tp_invariant_recipes.settings.model_shape import ModelShape

DENSE = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "vocab_size": 100, "seq_length": 32}


def test_what_is_unset_has_the_default_of_megatron():
    shape = ModelShape(DENSE | {"num_query_groups": None})
    assert (shape.groups, shape.head_width, shape.ffn, shape.expert_width) == (4, 16, 256, 256)
    assert (shape.experts, shape.shared_width, shape.depths, shape.pattern, shape.gates) == (0, 0, 0, "", 1)
    assert (shape.hybrid, shape.latent, shape.tied, shape.biased) == (False, False, False, False)


def test_what_is_set_is_that():
    more = {"num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 96, "num_moe_experts": 8}
    shape = ModelShape(DENSE | more | {"moe_ffn_hidden_size": 48, "gated_linear_unit": True})
    assert (shape.groups, shape.head_width, shape.ffn, shape.experts) == (2, 8, 96, 8)
    assert (shape.expert_width, shape.gates, shape.hidden, shape.sequence) == (48, 2, 64, 32)


@pytest.mark.parametrize(
    "name, field",
    (
        ("hidden", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("vocabulary", "vocab_size"),
        ("sequence", "seq_length"),
    ),
)
def test_a_size_that_every_model_has_is_missed_by_its_name(name, field):
    with pytest.raises(KeyError, match=field):
        getattr(ModelShape({key: value for key, value in DENSE.items() if key != field}), name)
