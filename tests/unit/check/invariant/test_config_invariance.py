# SPDX-License-Identifier: Apache-2.0
"""What `numerics=tree` covers, and that everything else is refused before it starts, with the key to change."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.check.invariant import shards
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.settings import schema
from tp_invariant_recipes.settings.run_config import RunConfig

TREE = compose("qwen3_toy", ["numerics=tree"], device="cpu").config


NUMBERS = st.sampled_from((4, 6, 8, 12, 16, 24, 48))
DIMENSIONS = st.fixed_dictionaries({f"model__{name}": NUMBERS for name in shards.SHARDED})


def as_program(config: RunConfig) -> RunConfig:
    """As a program of its own has it: without a section `train`, and asked no rules of the layout."""
    return RunConfig({**config.sections, "train": {}})


@given(DIMENSIONS, st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((1, 2, 3, 4, 8, 16)))
def test_shards_divide_the_model_and_ranks_divide_shards(dimensions, shards, tp):
    fields = dimensions | {"model__tensor_model_parallel_size": tp, "device__kind": "gpu"}
    result = limits_of(as_program(with_fields(TREE, **fields, numerics__virtual_shards=shards)))
    fits = all((number / shards).is_integer() for number in dimensions.values())
    assert bool(result) == (not fits or not (shards / tp).is_integer())
    if match := re.search(r"the largest that fits is numerics\.virtual_shards=(\d+)$", "\n".join(result)):
        repeated = limits_of(as_program(with_fields(TREE, **fields, numerics__virtual_shards=int(match[1]))))
        assert not any(" does not divide model." in line or "must be a power of two" in line for line in repeated)
    elif result:
        ((text, solve),) = (line.split("; ") for line in result)
        assert text.startswith(f"tp={tp} does not divide numerics.virtual_shards={shards}")
        too_small = {name for name, size in dimensions.items() if size % tp}
        if tp == 3:
            assert solve == f"tp can be {', '.join(str(n) for n in (1, 2, 4, 8, 16) if n <= shards)}"
        elif too_small:
            assert {f"model__{name}" for name in re.findall(r"model\.(\w+)", text)} == too_small
        else:
            assert solve == "raise numerics.virtual_shards or lower tp"
            assert limits_of(as_program(with_fields(TREE, **fields, numerics__virtual_shards=tp))) == []


def test_invariant_numerics_are_the_default_and_stock_is_asked_for():
    assert compose("qwen3_toy").config.numerics == TREE.numerics
    assert compose("qwen3_toy", ["numerics=stock"]).config.numerics.mode == "stock"
    assert compose("qwen3_toy", numerics="stock").config.numerics.mode == "stock"
    assert compose("qwen3_toy", ["numerics=tree"], numerics="stock").config == compose("qwen3_toy").config


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose("qwen3_toy", overrides, device="gpu")
    return str(error.value)


def test_several_limits_are_listed_and_the_way_out_is_reported_once():
    assert refused("cuda_graph=full", "pp=2", "model.delay_wgrad_compute=true").splitlines() == [
        "2 problems in this configuration:",
        "  - numerics=tree: stages wait for each other where a captured step cannot; pp=1, or with numerics=tree "
        "cuda_graph=te",
        "  - numerics=tree: model.delay_wgrad_compute=true: the invariant sums have an exchange of their own; "
        "model.delay_wgrad_compute=false or null",
        "for the invariant numerics: change these, or numerics=stock",
    ]


@pytest.mark.parametrize("override", ("tp=3", "tp=0", "dp=0", "pp=-1"))
def test_what_stock_numerics_would_refuse_too_does_not_end_with_stock(override):
    assert "numerics" not in refused(override)


def test_a_field_of_the_model_that_no_rule_knows_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(schema, "is_default", lambda *field: False)  # asks Bridge
    unknown = {"model__test_mode": True, "model__use_mup": None}
    assert limits_of(with_fields(TREE, **unknown)) == [
        f"numerics=tree: model.{field}: the invariant numerics do not know this field; leave model.{name} unset"
        for field, name in (("test_mode=true", "test_mode"), ("use_mup=null", "use_mup"))
    ]
    assert limits_of(with_fields(TREE, **unknown, numerics__mode="stock")) == []
