"""What tpi takes of LoRA, what the invariant numerics cover of it, and the memory of a run with adapters."""

import pytest

from tests.trees import with_fields
from tp_invariant_recipes.config import identity
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import invariance
from tp_invariant_recipes.coverage import lora as lora_coverage
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import peft
from tp_invariant_recipes.settings.run_config import typed
from tp_invariant_recipes.sizing import memory
from tp_invariant_recipes.sizing.size import ATTENTION, EXPERTS, MLP, adapters
from tp_invariant_recipes.sources import lora

BASE = ("peft=lora", "checkpoint.pretrained_checkpoint=base")
TREE = compose("qwen3_toy", [*BASE, "numerics=tree"], device="cpu").tree
EXPERTS_TREE = compose("qwen3_moe_toy", [*BASE, "numerics=stock"], device="cpu").tree


def changed(**fields) -> dict:
    return with_fields(TREE, **fields)


@pytest.mark.parametrize("device", ("cpu", "gpu"))
@pytest.mark.parametrize("model", ("qwen3_8b", "llama32_1b", "qwen25_7b"))
def test_dense_models_are_covered(model, device):
    tree = compose(model, [*BASE, "tp=2", "peft.dim=16"], device=device).tree
    assert tree["numerics"]["mode"] == "tree"
    assert tree["peft"]["dim"] == 16


# What is changed, and what the line about it says after "numerics=tree: ".
BEYOND = (
    ({"model__num_moe_experts": 8}, "LoRA is covered for dense models"),
    ({"model___target_": "megatron.bridge.models.hybrid.hybrid_provider.HybridModelProvider"}, "LoRA is covered for"),
    ({"peft__target_modules": ["in_proj"]}, "of layers only linear_qkv, linear_fc1, linear_proj, linear_fc2"),
    ({"peft__target_modules": ["*.layers.0.*.linear_qkv"]}, "of layers only linear_qkv"),
    ({"peft__target_modules": []}, "of layers only linear_qkv"),
    ({"peft__dropout": 0.1}, "dropout of adapters draws other numbers in every layout; peft.dropout=0"),
    ({"model__cuda_graph_impl": "full_iteration"}, "adapters have not been captured in CUDA graphs; cuda_graph=off"),
    ({"model__pipeline_model_parallel_layout": "Et*2L"}, "a stage without layers has no adapter"),
    *(({f"peft__{name}": ["x"]}, f"peft.{name} is not covered; leave it unset") for name in lora_coverage.OFF),
)


@pytest.mark.parametrize("fields, says", BEYOND, ids=[str(fields) for fields, _ in BEYOND])
def test_what_has_no_invariant_version_is_refused_under_tree_only(fields, says):
    found = [problem for problem in invariance.limits(changed(**fields)) if says in problem]
    assert len(found) == 1
    assert found[0].startswith("numerics=tree: ")
    assert invariance.limits(changed(**fields, numerics__mode="stock")) == []


def test_context_shards_are_refused():
    found = invariance.limits(changed(numerics__context_shards=2))
    assert any("LoRA has no version with context shards; cp=1" in problem for problem in found)


@pytest.mark.parametrize("mode", ("gather", "portable"))
def test_other_modes_refuse_it(mode):
    assert f"numerics={mode}: LoRA is covered by numerics=tree only" in invariance.limits(changed(numerics__mode=mode))


# What is wrong whatever the numerics -> what is said.
WRONG = {
    "peft.dim=6 tp=4": "tp=4 does not divide peft.dim=6, whose rows the ranks share; peft.dim=8",
    "peft.dim=0": "peft.dim=0: must be at least 1",
    "peft.dropout=2": "peft.dropout=2: must be from 0 to 1",
    "peft.dimension=8": "peft.dimension: no such field of LoRA",
    "peft.lora_A_init_method=uniform": "adapters begin with xavier, normal, kaiming, zero only",
    "peft=dora": "unknown peft 'dora'",
    "checkpoint.pretrained_checkpoint=null": "LoRA adapts weights that are there: weights=FOLDER of Hugging Face, or",
}


@pytest.mark.parametrize("numerics", ("tree", "stock"))
@pytest.mark.parametrize("words", WRONG)
def test_settings_that_are_wrong_for_all_numerics(words, numerics):
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", [*BASE, *words.split()], device="cpu", numerics=numerics)
    assert WRONG[words] in str(caught.value)


def test_a_layer_that_does_not_exist():
    (problem,) = lora.problems(changed(peft__target_modules=["linear_qvk"]))
    assert problem.startswith("peft.target_modules: no layer is named linear_qvk; did you mean 'linear_qkv'")


def test_a_dim_that_only_row_parallel_layers_use_need_not_be_divided():
    split = {"peft__dim": 6, "model__tensor_model_parallel_size": 4}
    assert len(lora.problems(changed(**split))) == 1
    assert lora.problems(changed(**split, peft__target_modules=["linear_proj"])) == []


def test_stock_weights_of_other_adapters_are_megatrons():
    says = "numerics.initial_weights=invariant draws adapters of linear_qkv"
    drawn = with_fields(EXPERTS_TREE, numerics__initial_weights="invariant")
    assert lora.problems(EXPERTS_TREE) == []
    assert [problem[: len(says)] for problem in lora.problems(drawn)] == [says]


def test_without_the_section_all_weights_are_trained():
    tree = compose("qwen3_toy", ["peft=none"], device="cpu").tree
    assert tree == compose("qwen3_toy", device="cpu").tree
    assert "peft" not in tree
    assert not [key for key in identity.identity(tree, None) if key.startswith("peft")]
    assert identity.identity(TREE, None)["peft.dim"] == 32


def test_the_parameters_of_adapters():
    model = compose("qwen3_8b", device="gpu").tree["model"]
    assert adapters(model, ATTENTION, 8, peft.TARGETS).total == 8 * (4096 + 6144 + 4096 + 4096)
    assert adapters(model, MLP, 8, ("linear_fc1",)).total == 8 * (4096 + 2 * 12288)
    assert adapters(model, EXPERTS, 8, peft.TARGETS).total == 0


def test_frozen_weights_have_neither_gradients_nor_moments():
    whole, adapted = (
        memory.estimate(typed(compose("qwen3_8b", words, device="gpu").tree)).parts for words in ((), (*BASE,))
    )
    count = 36 * 32 * (4096 + 6144 + 4096 + 4096 + 4096 + 2 * 12288 + 12288 + 4096)
    assert adapted[memory.WEIGHTS] == whole[memory.WEIGHTS] + 2 * count
    assert (adapted[memory.GRADIENTS], adapted[memory.OPTIMIZER]) == (4 * count, 12 * count)
