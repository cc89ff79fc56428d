"""What `numerics=tree` covers of hybrid models, and what says no to the rest."""

import copy

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.coverage import invariance

TREE = compose("qwen3_toy", ["numerics=tree", "numerics.virtual_shards=2"], device="cpu").tree


def problems(mode="tree", **fields):
    tree = copy.deepcopy(TREE)
    tree["model"] |= {"hybrid_layer_pattern": "M*-E|M", "mamba_num_groups": 8, **fields}
    tree["numerics"]["mode"] = mode
    return invariance.limits(tree)


def test_layers_that_are_covered():
    assert problems() == []


@pytest.mark.parametrize("pattern", ("MG", "MD", "M*/M*"))
def test_layers_that_are_not(pattern):
    (problem,) = problems(hybrid_layer_pattern=pattern)
    assert problem.startswith("numerics=tree: of hybrid layers only M, *, - and E have invariant versions")
    assert problems("stock", hybrid_layer_pattern=pattern) == []


def test_gather_covers_none():
    assert problems("gather") == ["numerics=gather: Mamba layers are covered by numerics=tree only"]


@pytest.mark.parametrize("field", ("mamba_num_groups", "mamba_num_heads"))
def test_shards_divide_groups_and_heads(field):
    (problem,) = problems(**{field: 9})
    wrong = f"numerics.virtual_shards=2 does not divide model.{field}=9"
    assert problem == f"{wrong}; the largest that fits is numerics.virtual_shards=1"
