"""The lines of `tpi models --bridge`, and what the messages of refusals come to in it."""

import runpy
from pathlib import Path

import pytest

from tp_invariant_recipes.features import recipe_list
from tp_invariant_recipes.sources import recipe_source


def a_row(names: str, family: str, state: str, *why: str, **more) -> dict:
    listed = names.split()
    row = {"recipe": listed[0], "names": listed, "family": family, "tree": state, "why": [*why], "keys": [], "open": []}
    return row | more


ROWS = [
    a_row("a", "one", "covered", open=["dp=4"]),
    a_row("b", "one", "refused", "recipe=b: it fine-tunes with LoRA: the …; c"),
    a_row("c", "two", "not here", f"recipe=c: {recipe_source.NEEDS} a/C-3, which …"),
    a_row("d e", "one", "covered with", "x; a.b=1", keys=["a.b=1"]),
]
REASONS = {
    "numerics=tree: FP8 and FP4 scales depend on how a tensor is cut; precision=bf16": "FP8 and FP4 scales depend on "
    "how a tensor is cut",
    "model.vocab_size=0: must be at least 1": "must be at least N",
    "recipe=x: it fine-tunes with LoRA: the products of adapters …": "it fine-tunes with LoRA",
    "numerics=tree: model.a: the invariant numerics do not know this field; leave it unset": "model.a: the invariant "
    "numerics do not know this field",
}
KEYS = {
    "recipe=a: its dataset is a B, and tpi trains with C only": [],
    "a recipe for fine-tuning needs dataset.dataset_root=FOLDER, which has training.jsonl": [
        "dataset.dataset_root=examples"
    ],
    "cluster.environment.A_B=20: x; leave it out or set cluster.environment.A_B=0": ["cluster.environment.A_B=0"],
    "the recipe sets a.b to an object; leave it out of the recipe, or numerics=stock": [],
    "numerics=tree: x; precision=bf16 or precision=fp32": ["precision=bf16"],
    "x; model.hidden_dropout=0, model.attention_dropout=0": ["model.hidden_dropout=0", "model.attention_dropout=0"],
    "model.a: the invariant numerics do not know this field; leave it unset": [],
    "etp * ep * pp = 8 does not divide the 2 ranks (tp * pp * cp * dp); raise dp or tp, or lower ep=8": [
        "dp=4",
    ],
}


def test_a_line_a_family():
    assert [recipe_list.summary(family) for family in recipe_list.families(ROWS)] == [
        "one: 1 covered, 1 covered with, 1 refused: it fine-tunes with LoRA",
        "two: 1 not here",
    ]


def test_the_counts_of_the_documentation():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "recipe-table"))
    line = "1 of 4 recipes are covered, 1 with keys; 1 are refused, and 1 are not here."
    assert script["sentence"](ROWS) == line


def test_the_recipes_of_a_family_and_what_the_states_mean():
    assert list(recipe_list.details(ROWS)) == [
        "a: covered dp=4",
        "b: refused",
        "    it fine-tunes with LoRA: the …; c",
        "c: not here",
        "d: covered with a.b=1",
    ]
    first, _, absent = recipe_list.legend(ROWS)
    assert first == "4 recipes of 5 names: 1 covered, 1 covered with, 1 refused, 1 not here"
    assert absent.endswith("as for a/C-3, or recipe.hf_folder=FOLDER")
    assert len(recipe_list.legend(ROWS[:1])) == 2


def test_names_of_one_recipe_are_one(monkeypatch):
    """Aliases of one function, and names that differ by the number of GPUs alone."""
    functions = {
        "a_config": "a_4gpu_h100_config", "a_4gpu_h100_config": "a_4gpu_h100_config", "a_16gpu_h100_config":
        "a_16gpu_h100_config", "a_8gpu_gb200_config": "a_8gpu_gb200_config",
    }  # fmt: skip
    monkeypatch.setattr(recipe_source, "installed_names", lambda: tuple(functions))
    monkeypatch.setattr(recipe_source, "benchmark_names", lambda: ("m:a_4gpu_h100_config",))
    place = {name: ("megatron.bridge.recipes.a", function) for name, function in functions.items()}
    place["m:a_4gpu_h100_config"] = ("megatron.bridge.perf_recipes.a", "a_4gpu_h100_config")
    monkeypatch.setattr(recipe_source, "function", place.__getitem__)
    assert recipe_list.groups() == [
        ("a_config", "a_4gpu_h100_config", "a_16gpu_h100_config"),
        ("a_8gpu_gb200_config",),
        ("m:a_4gpu_h100_config",),
    ]


@pytest.mark.parametrize("problem", REASONS)
def test_the_reason_without_recipe_values_and_keys(problem):
    assert recipe_list.reason(problem) == REASONS[problem]


def test_more_data_parallel_ranks_than_before():
    message = "etp * ep * pp = 8 does not divide the 4 ranks (tp * pp * cp * dp); raise dp or tp, or lower ep=8"
    assert recipe_list._keys([message], ["dp=2"]) == ["dp=4"]


@pytest.mark.parametrize("problem", KEYS)
def test_the_keys_that_a_message_names(problem):
    assert recipe_list._named(problem) == KEYS[problem]
