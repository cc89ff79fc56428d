# SPDX-License-Identifier: Apache-2.0
"""What tpi takes of LoRA, what the invariant numerics cover of it, and the memory of a run with adapters."""

import pytest

from tests.rules import limits_of, table_problems
from tests.trees import with_fields
from tp_invariant_recipes.check import layout as layout_rules
from tp_invariant_recipes.check.finetuning import ADAPTER_RULES
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.size import ATTENTION, EXPERTS, MLP, adapters

BASE = ("peft=lora", "checkpoint.pretrained_checkpoint=base")
TREE = compose("qwen3_toy", [*BASE, "numerics=tree"], device="cpu").config
MAMBA = ("nemotron3_nano_toy", ("linear_qkv", "linear_proj", "in_proj", "out_proj"))
_LATENTS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
LATENT = ("deepseek_v3_toy", _LATENTS)


def _adapting(model, *targets, **fields):
    stock = [*BASE, "numerics=stock", "model.moe_router_bias_update_rate=0"]
    tree = compose(model, stock, device="cpu").config
    return with_fields(tree, numerics__mode="tree", peft__target_modules=[*targets], **fields)


@pytest.mark.parametrize("model, targets", (MAMBA, LATENT, ("qwen3_moe_toy", finetuning.DEFAULT)))
def test_other_layers_are_covered(model, targets):
    for shared in (True, False):
        run = _adapting(model, *targets, peft__share_expert_adapters=shared)
        assert [why for why in limits_of(run) if "adapter" in why] == []
    refused = limits_of(_adapting(model, *targets, peft__experts_shared_outer_loras=True))
    assert len([why for why in refused if "peft.experts_shared_outer_loras=false" in why]) == 1


@pytest.mark.parametrize(
    "targets, without",
    ((("linear_qkv",), "EMEM"), (("linear_qkv", "in_proj"), None), (("linear_fc1",), None), (finetuning.DEFAULT, None)),
)
def test_every_stage_of_a_pipeline_has_adapters(targets, without):
    """Megatron-Core has no backward pass of a stage in which nothing is trained."""
    fields = {"model__hybrid_layer_pattern": "MEM*EMEM", "model__pipeline_model_parallel_size": 2}
    results = [
        line for line in table_problems(layout_rules, _adapting(MAMBA[0], *targets, **fields)) if "no adapter" in line
    ]
    message = f"pp=2: a stage {without} has no adapter; lower pp, or name its layers in peft.target_modules"
    assert results == ([message] if without else [])


CUT_OFF = (
    ("qwen3_toy", ("linear_fc2",), ["core_attn", "mlp"], "mlp"),
    ("qwen3_toy", finetuning.DEFAULT, ["layernorm", "mlp"], "layernorm"),
    ("qwen3_moe_toy", ("linear_fc1", "*.layers.0.*.linear_fc2"), ["moe"], "moe"),
    ("qwen3_toy", ("linear_fc2",), ["core_attn"], None),
    ("qwen3_toy", ("linear_fc2", "linear_proj"), ["core_attn", "mlp"], None),
)


@pytest.mark.parametrize("model, targets, modules, wrong", CUT_OFF, ids=str)
def test_what_is_computed_again_has_a_gradient_at_its_input(model, targets, modules, wrong):
    """Megatron-Core trained nothing of it, and the gradient norm was 0; of a norm it failed in the backward pass."""
    again = {"model__recompute_granularity": "selective", "model__recompute_modules": modules}
    for mode in ("tree", "stock"):
        config = with_fields(_adapting(model, *targets, **again), numerics__mode=mode)
        problems = map(str, broken_rules(config, ADAPTER_RULES))
        named = [line.split(": ")[1] for line in problems if "recompute_modules" in line]
        assert named == ([wrong] if wrong else [])


def test_without_the_section_all_weights_are_trained():
    tree = compose("qwen3_toy", ["peft=none"], device="cpu").config
    assert tree == compose("qwen3_toy", device="cpu").config
    assert "peft" not in tree.sections
    assert not [key for key in fingerprint.fingerprint(tree, None) if key.startswith("peft")]
    assert fingerprint.fingerprint(TREE, None)["peft.dim"] == 32


def test_the_parameters_of_adapters():
    model = compose("qwen3_8b", device="gpu").config.shape
    assert adapters(model, ATTENTION, 8, finetuning.TARGETS).total == 8 * (4096 + 6144 + 4096 + 4096)
    assert adapters(model, MLP, 8, ("linear_fc1",)).total == 8 * (4096 + 2 * 12288)
    model = compose("qwen3_30b_a3b", device="gpu").config.shape
    shared = 8 * (2048 + 2 * 768 + 768 + 2048)
    assert adapters(model, EXPERTS, 8, finetuning.TARGETS).whole == shared
    assert adapters(model, EXPERTS, 8, finetuning.TARGETS, shared=False).experts == 128 * shared


def test_frozen_weights_have_neither_gradients_nor_moments():
    whole, adapted = (
        memory.estimate(compose("qwen3_8b", words, device="gpu").config).parts for words in ((), (*BASE,))
    )
    count = 36 * 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 2 * 12288 + 12288 + 4096)
    assert adapted[memory.WEIGHTS] == whole[memory.WEIGHTS] + 2 * count
    assert (adapted[memory.GRADIENTS], adapted[memory.OPTIMIZER]) == (4 * count, 12 * count)
