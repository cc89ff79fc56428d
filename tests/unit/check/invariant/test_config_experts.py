"""What the invariant experts cover, and V where none is given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.check.invariant import shards
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings.run_config import RunConfig


# Without ep: test_v_of_the_models_is_the_same_in_every_layout. Toys are trained: tests/distributed/layouts.
@pytest.mark.parametrize("model", ("qwen3_30b_a3b", "nemotron3_nano"))
@pytest.mark.parametrize("layout", (("tp=2", "ep=2"), ("tp=1", "dp=2", "ep=2", "gbs=2")))
def test_the_recipes_are_covered(model, layout):
    assert compose(model, ["numerics=tree", *layout], device="gpu").config.numerics.mode == "tree"


@given(
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=len(shards.SHARDED)),
    others=st.sampled_from(("abc", None)),
)
def test_v_where_none_is_given(sizes, others):
    model = dict.fromkeys(shards.SHARDED, others) | dict(zip(shards.SHARDED, sizes, strict=False))
    count = shards.default_shards(RunConfig({"model": model, "device": {"kind": "gpu"}}))
    assert count in (1, 2, 4, 8)
    assert all(size % count == 0 for size in sizes)
    assert count == 8 or math.gcd(*sizes) % (2 * count)


@pytest.mark.parametrize("model, shards", (("qwen3_8b", 8), ("qwen3_30b_a3b", 4), ("nemotron3_nano", 2)))
def test_v_of_the_models_is_the_same_in_every_layout(model, shards):
    for layout in (["tp=1"], ["tp=2"], ["tp=2", "dp=2", "gbs=2"]):
        assert compose(model, ["numerics=tree", *layout], device="gpu").config.numerics.virtual_shards == shards
    given = compose(model, ["numerics=tree", "numerics.virtual_shards=2"], device="gpu").config.section("numerics")[
        "virtual_shards"
    ]
    assert given == 2
