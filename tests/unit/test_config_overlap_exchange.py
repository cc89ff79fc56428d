"""numerics.overlap_exchange: which runs may have it, that it changes no identity, and how it reaches the layers."""

from types import SimpleNamespace

import pytest

from tp_invariant_recipes.config import container
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.identity import identity
from tp_invariant_recipes.workflows import bench

KEY = "numerics.overlap_exchange"
ASKED = f"{KEY}=true"


def test_runs_with_and_without_it_are_comparable():
    """The control: what changes bits changes the identity."""
    without, asked, other = (
        identity(compose("qwen3_toy", ["gbs=2", *more], device="gpu").config, None)
        for more in ([], [ASKED], ["numerics.data_shards=2"])
    )
    assert asked == without != other


@pytest.mark.parametrize("overrides, given", (([], False), ([ASKED], True)))
def test_the_layers_configuration_has_it(overrides, given):
    provider = SimpleNamespace(context_parallel_size=1)
    config = compose("qwen3_toy", overrides, device="gpu").config
    provider.register_pre_wrap_hook = lambda hook: None
    container._numerics(provider, config)
    assert provider.overlap_exchange is given


def test_a_benchmark_leaves_it_out_of_stock(monkeypatch):
    monkeypatch.setattr(bench.plan, "detect_device", lambda: "gpu")
    problems = []
    found = bench._composed("qwen3_toy", ["tp=2", ASKED], ("stock", "tree"), problems)
    assert [one.config.numerics.overlap_exchange for one in found.values()] == [False, True]
    assert problems == []
