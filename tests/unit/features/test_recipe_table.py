# SPDX-License-Identifier: Apache-2.0
"""What the messages of refusals come to in `tpi show --fix`, and the counts of `scripts/recipe-table`."""

import runpy
from pathlib import Path

import pytest

from tp_invariant_recipes.features import recipe_fix
from tp_invariant_recipes.sources import recipe_source

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "recipe-table"))
KEYS = {
    "recipe=a: its dataset is a B, and tpi trains with C only": [],
    "a recipe for fine-tuning needs dataset.dataset_root=FOLDER, which has training.jsonl": [
        "dataset.dataset_root=examples"
    ],
    "cluster.environment.A_B=20: x; leave it out or set cluster.environment.A_B=0": ["cluster.environment.A_B=0"],
    "the recipe sets a.b to an object; leave it out of the recipe, or numerics=stock": [],
    "numerics=tree: x; precision=bf16 or precision=fp32": ["precision=bf16"],
    "x; model.hidden_dropout=0, model.attention_dropout=0": ["model.hidden_dropout=0", "model.attention_dropout=0"],
    "model.a=1: the invariant numerics do not know this field; leave model.a unset": [],
    "etp * ep * pp = 8 does not divide the 2 ranks (tp * pp * cp * dp); raise dp or tp, or lower ep=8": ["dp=4"],
}


def test_names_of_one_recipe_are_one(monkeypatch):
    """Aliases of one function, and names that differ by the number of GPUs alone."""
    functions = {
        "a_config": "a_4gpu_h100_config", "a_4gpu_h100_config": "a_4gpu_h100_config", "a_16gpu_h100_config":
        "a_16gpu_h100_config", "a_8gpu_gb200_config": "a_8gpu_gb200_config",
    }  # fmt: skip
    monkeypatch.setattr(recipe_source, "installed_names", lambda: tuple(functions))
    groups = SCRIPT["groups"]
    monkeypatch.setitem(groups.__globals__, "benchmark_names", lambda: ("m:a_4gpu_h100_config",))
    place = {name: ("megatron.bridge.recipes.a", function) for name, function in functions.items()}
    place["m:a_4gpu_h100_config"] = ("megatron.bridge.perf_recipes.a", "a_4gpu_h100_config")
    monkeypatch.setitem(groups.__globals__, "definition", place.__getitem__)
    assert groups() == [
        ("a_config", "a_4gpu_h100_config", "a_16gpu_h100_config"),
        ("a_8gpu_gb200_config",),
        ("m:a_4gpu_h100_config",),
    ]


def test_more_data_parallel_ranks_than_before():
    message = "etp * ep * pp = 8 does not divide the 4 ranks (tp * pp * cp * dp); raise dp or tp, or lower ep=8"
    assert recipe_fix._keys([message], ["dp=2"]) == ["dp=4"]


@pytest.mark.parametrize("problem", KEYS)
def test_the_keys_that_a_message_names(problem):
    assert recipe_fix._named(problem) == KEYS[problem]
