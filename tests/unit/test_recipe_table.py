"""The table of `tpi models --bridge --families`, and what the messages of refusals come to in it."""

import pytest

from tp_invariant_recipes.workflows import recipe_list

ROWS = [
    {"recipe": "a", "family": "one", "tree": "covered", "why": [], "keys": []},
    {
        "recipe": "b",
        "family": "one",
        "tree": "refused",
        "why": ["recipe=b: it fine-tunes with LoRA: the …; c"],
        "keys": [],
    },
    {"recipe": "c", "family": "two", "tree": "not here", "why": ["recipe=c: needs the …"], "keys": []},
    {"recipe": "d", "family": "one", "tree": "covered with", "why": ["x; a.b=1"], "keys": ["a.b=1"]},
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
        "gbs=64",
    ],
}


def test_a_row_a_family():
    assert recipe_list.markdown(ROWS).splitlines() == [
        "| family | covered | covered with | refused | not here | refused because |",
        "| --- | --- | --- | --- | --- | --- |",
        "| one | 1 | 1 | 1 |  | it fine-tunes with LoRA (1) |",
        "| two |  |  |  | 1 |  |",
    ]


@pytest.mark.parametrize("problem", REASONS)
def test_the_reason_without_recipe_values_and_keys(problem):
    assert recipe_list.reason(problem) == REASONS[problem]


def test_more_data_parallel_ranks_than_before():
    said = "etp * ep * pp = 8 does not divide the 4 ranks (tp * pp * cp * dp); raise dp or tp, or lower ep=8"
    assert recipe_list._keys([said], ["dp=2"]) == ["dp=4", "gbs=64"]


@pytest.mark.parametrize("problem", KEYS)
def test_the_keys_that_a_message_names(problem):
    assert recipe_list._named(problem) == KEYS[problem]
