# SPDX-License-Identifier: Apache-2.0
"""What is typed: numbers within sense, functions by name, settings that something reads. refusals.py has more rows."""

import pydoc

import pytest

from tests.unit.check.refusals import FAMILIES, problems_of
from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings.keys import SHORT_KEYS

STOCK = compose("qwen3_toy", ("numerics=stock",), device="cpu").config
COUNTS = [key.name for key in SHORT_KEYS.values() if key.type is int and key.name != "seed"]
FUNCTIONS = {  # a function -> whether the field may have it; Bridge alone knows the types of these fields
    "activation_func=os.system": False, "activation_func=torch.save": False, "activation_func=silu": False,
    "init_method=os.remove": False, "embedding_init_method=torch.nn.init.eye_": False,
    "output_layer_init_method=torch.load": False, "transformer_layer_spec=shutil.rmtree": False,
    "grad_scale_func=os.system": False, "finalize_model_grads_func=megatron.core.utils.divide": False,
    "activation_func=torch.nn.functional.gelu": True, "activation_func=megatron.core.activations.squared_relu": True,
    "init_method=torch.nn.init.xavier_uniform_": True,
    "transformer_layer_spec=megatron.bridge.models.gpt_provider.local_layer_spec": True, "num_layers=2": True,
}  # fmt: skip


@pytest.mark.parametrize("words", FUNCTIONS)
def test_a_function_is_one_of_those_that_its_field_may_have(words):
    name, _, value = words.partition("=")
    config = STOCK.with_fields("model", **{name: value})
    problems = typed_rules.unknown(config, [f"model.{name}"])
    assert [problem.key for problem in problems] == ([] if FUNCTIONS[words] else [f"model.{words}"])
    assert typed_rules.unknown(config, ()) == []  # of a recipe
    assert typed_rules.unknown(config.with_fields("model", **{name: None}), [f"model.{name}"]) == []


def test_every_name_is_a_function_of_the_installed_packages(bridge):
    names = [name for _, names, _ in typed_rules.KNOWN for name in names if name[-1] != "."]
    assert [name for name in names if not callable(pydoc.locate(name))] == []


def test_each_feature_that_can_be_off_has_a_row():
    rows = [
        (words.split()[-1]) for rows in FAMILIES.values() for words, rules in rows.refused.items() if "idle" in rules
    ]
    (window,) = typed_rules.idle(STOCK.with_fields("model", window_attn_skip_freq=2), ["model.window_attn_skip_freq"])
    modules = STOCK.with_fields("model", recompute_granularity="full", recompute_modules=["mlp"])
    (again,) = typed_rules.idle(modules, ["model.recompute_modules"])
    rows += [window.key, again.key]
    assert [f.fields for f in typed_rules.FEATURES if not any(word.startswith(f.fields) for word in rows)] == []
    assert typed_rules.idle(STOCK.with_fields("model", moe_router_topk=4, moe_aux_loss_coeff=0), []) == []  # a recipe's
    assert typed_rules.idle(STOCK.with_fields("model", moe_aux_loss_coeff=0), ["model.moe_aux_loss_coeff"]) == []


@pytest.mark.parametrize(
    "model, modules, read",
    (
        ("qwen3_toy", ["core_attn", "mlp"], True),
        ("qwen3_toy", ["core_attn", "moe"], False),
        ("qwen3_moe_toy", ["moe"], True),
        ("qwen3_moe_toy", ["moe", "shared_experts"], False),
        ("moonlight_toy", ["shared_experts"], True),
    ),
    ids=str,
)
def test_parts_that_are_computed_again_are_those_of_the_model(model, modules, read):
    config = compose(model, ("numerics=stock",), device="cpu").config
    config = config.with_fields("model", recompute_granularity="selective", recompute_modules=modules)
    assert (typed_rules.idle(config, ["model.recompute_modules"]) == []) is read


@pytest.mark.timeout(20)
def test_a_count_beyond_its_bound_is_refused_by_its_name():
    assert set(typed_rules.SHORT) == set(COUNTS)
    beyond = [f"{key}={limit + 1}" for key, limit in typed_rules.SHORT.items()]
    says = {f"{key}={limit + 1}: must be at most {limit}" for key, limit in typed_rules.SHORT.items()}
    assert {problem for problem in problems_of(*beyond) if "must be at most" in problem} == says
    tree = compose("qwen3_toy", (), device="cpu").config.sections
    for key, limit in typed_rules.SHORT.items():
        section, _, name = SHORT_KEYS[key].path.partition(".")
        tree[section][name] = limit
    assert typed_rules.wrong(tree) == {}


@pytest.mark.parametrize("key, limit", (("model.num_layers", typed_rules.LARGEST), ("slurm.tries", typed_rules.WIDEST)))
@pytest.mark.timeout(20)
def test_any_other_whole_number_has_a_bound_too(key, limit):
    assert problems_of(f"{key}={26 * '9'}") == [f"{key}={26 * '9'}: must be at most {limit}"]


@pytest.mark.timeout(20)
def test_other_mistakes_are_listed_beside_numbers_without_end():
    problems = problems_of("iters=" + 26 * "9", "gbs=" + 5000 * "9", "tp=3", "seq=-99999999999999999999")
    assert problems[0] == f"'gbs={26 * '9'}…' is not KEY=VALUE: too many digits"
    assert {problem.partition("=")[0] for problem in problems[1:3]} == {"iters", "seq"}
    assert any(problem.startswith("tp=3 does not divide") for problem in problems[3:])
