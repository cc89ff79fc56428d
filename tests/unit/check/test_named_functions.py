"""A function that the command line names is one of those that its field may have."""

import pydoc

import pytest

from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.config.compose import compose

CONFIG = compose("qwen3_toy", ("numerics=stock",), device="cpu").config
REFUSED = {
    "model.activation_func=os.system": "no function that tpi knows; model.activation_func=torch.nn.functional.silu",
    "model.activation_func=torch.save": "another of torch's",
    "model.activation_func=silu": "model.activation_func=torch.nn.functional.silu",
    "model.init_method=os.remove": "model.init_method_std=0.02",
    "model.embedding_init_method=torch.nn.init.eye_": "such as torch.nn.init.normal_",
    "model.output_layer_init_method=torch.load": "one of torch.nn.init",
    "model.transformer_layer_spec=shutil.rmtree": "a recipe with its own",
    "model.grad_scale_func=os.system": "leave it out: the training loop sets it",
    "model.finalize_model_grads_func=megatron.core.utils.divide": "the training loop sets it",
}
TAKEN = (
    "model.activation_func=torch.nn.functional.gelu",
    "model.activation_func=megatron.core.activations.squared_relu",
    "model.init_method=torch.nn.init.xavier_uniform_",
    "model.transformer_layer_spec=megatron.bridge.models.gpt_provider.local_layer_spec",
    "model.num_layers=2",
)


def unknown(words: str) -> list[str]:
    path, _, value = words.partition("=")
    config = CONFIG.with_fields("model", **{path.partition(".")[2]: value})
    assert typed_rules.unknown(config, ()) == []  # of a recipe
    return list(map(str, typed_rules.unknown(config, [path])))


@pytest.mark.parametrize("words", REFUSED)
def test_a_function_that_is_none_of_a_field_is_refused(words):
    (problem,) = unknown(words)
    assert problem.startswith(f"{words}: ")
    assert REFUSED[words] in problem


@pytest.mark.parametrize("words", TAKEN)
def test_a_known_function_is_taken(words):
    assert unknown(words) == []


def test_an_unset_field_has_no_function():
    assert typed_rules.unknown(CONFIG.with_fields("model", init_method=None), ["model.init_method"]) == []


def test_every_name_is_a_function_of_the_installed_packages(bridge):
    names = [name for _, names, _ in typed_rules.KNOWN for name in names if name[-1] != "."]
    assert [name for name in names if not callable(pydoc.locate(name))] == []
