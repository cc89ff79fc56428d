"""What tpi takes of LoRA, what the invariant numerics cover of it, and the memory of a run with adapters."""

import pytest

from tests.trees import with_fields
from tp_invariant_recipes.config import identity
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.size import ATTENTION, EXPERTS, MLP, adapters
from tp_invariant_recipes.sources import lora

BASE = ("peft=lora", "checkpoint.pretrained_checkpoint=base")
TREE = compose("qwen3_toy", [*BASE, "numerics=tree"], device="cpu").config
EXPERTS_TREE = compose("qwen3_moe_toy", [*BASE, "numerics=stock"], device="cpu").config


@pytest.mark.parametrize("device", ("cpu", "gpu"))
@pytest.mark.parametrize("model", ("qwen3_8b", "llama32_1b", "qwen25_7b"))
def test_dense_models_are_covered(model, device):
    tree = compose(model, [*BASE, "tp=2", "peft.dim=16"], device=device).config
    assert tree.numerics.mode == "tree"
    assert tree.section("peft")["dim"] == 16


def test_stock_weights_of_other_adapters_are_megatrons():
    says = "numerics.initial_weights=invariant draws adapters of linear_qkv"
    drawn = with_fields(EXPERTS_TREE, numerics__initial_weights="invariant")
    assert lora.problems(EXPERTS_TREE) == []
    assert [problem[: len(says)] for problem in lora.problems(drawn)] == [says]


def test_without_the_section_all_weights_are_trained():
    tree = compose("qwen3_toy", ["peft=none"], device="cpu").config
    assert tree == compose("qwen3_toy", device="cpu").config
    assert "peft" not in tree.sections
    assert not [key for key in identity.identity(tree, None) if key.startswith("peft")]
    assert identity.identity(TREE, None)["peft.dim"] == 32


def test_the_parameters_of_adapters():
    model = compose("qwen3_8b", device="gpu").config.model
    assert adapters(model, ATTENTION, 8, peft.TARGETS).total == 8 * (4096 + 6144 + 4096 + 4096)
    assert adapters(model, MLP, 8, ("linear_fc1",)).total == 8 * (4096 + 2 * 12288)
    assert adapters(model, EXPERTS, 8, peft.TARGETS).total == 0


def test_frozen_weights_have_neither_gradients_nor_moments():
    whole, adapted = (
        memory.estimate(compose("qwen3_8b", words, device="gpu").config).parts for words in ((), (*BASE,))
    )
    count = 36 * 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 2 * 12288 + 12288 + 4096)
    assert adapted[memory.WEIGHTS] == whole[memory.WEIGHTS] + 2 * count
    assert (adapted[memory.GRADIENTS], adapted[memory.OPTIMIZER]) == (4 * count, 12 * count)
