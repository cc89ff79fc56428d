"""What numerics=portable sets, whatever the device."""

import pytest

from tests.unit.check.refusals import problems
from tp_invariant_recipes.config.compose import compose


@pytest.mark.parametrize("model", ("qwen3_toy", "qwen3_8b", "qwen3_moe_toy"))
def test_a_gpu_has_the_layers_and_the_optimizer_of_a_cpu(model):
    """Whatever device=gpu sets otherwise: Transformer Engine's have a library's arithmetic."""
    trees = [compose(model, ["numerics=portable", "cuda_graph=off"], device=device).config for device in ("cpu", "gpu")]
    differing = {"distributed_backend", "kind"}
    for section in ("model", "optimizer", "ddp", "numerics"):
        first, second = (tree.section(section) for tree in trees)
        assert {name for name in {*first, *second} if first.get(name) != second.get(name)} <= differing, section


def test_models_that_are_covered():
    assert problems("qwen3_0p6b numerics=portable tp=2") == []
