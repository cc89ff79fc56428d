"""What a checkpoint of Transformer Engine's layers has beside weights. On a CPU no layer of a model has it."""

import pytest

from tp_invariant_recipes.features.export.rank import is_weight

FC1 = "decoder.layers.0.mlp.experts.linear_fc1"


@pytest.mark.parametrize(
    "name", ("_extra_state", f"{FC1}._extra_state", f"{FC1}._extra_state1", f"{FC1}._extra_state12")
)
def test_states_of_layers_are_no_weights(name):
    assert not is_weight(name)


@pytest.mark.parametrize("name", (f"{FC1}.weight0", f"{FC1}.weight12", "output_layer.weight", "x._extra_state.weight"))
def test_all_else_is(name):
    assert is_weight(name)
