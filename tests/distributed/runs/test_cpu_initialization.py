# SPDX-License-Identifier: Apache-2.0
"""Weights drawn on the CPU are the same in every layout; Megatron-Bridge alone draws them on the device."""

from types import SimpleNamespace

import pytest

from tests.distributed.small_models import DENSE
from tp_invariant_recipes.patches.bridge import CPU_WEIGHTS, drawn_on_the_cpu

# The learning rate is zero, so that the master weights after the step are those before it.
DRAWN = f"{DENSE} numerics=stock numerics.initial_weights=megatron lr=0 optimizer.min_lr=0 iters=1"
ON_THE_CPU = "model.use_cpu_initialization=true"


def masters(run) -> dict[str, str]:
    (step,) = run.ledger()
    return step.masters


@pytest.mark.release
def test_weights_of_the_cpu_follow_no_layout(scenario):
    drawn = scenario(DRAWN, ON_THE_CPU)
    assert masters(drawn("tp=1")) == masters(drawn("tp=2"))


@pytest.mark.release
def test_without_the_patch_the_field_is_forgotten(scenario):
    off = scenario(DRAWN, ON_THE_CPU, f"patches.off=[{CPU_WEIGHTS.name}]")
    assert masters(off("tp=1")) != masters(off("tp=2"))
    assert masters(off("tp=1")) == masters(scenario(DRAWN)("tp=1"))


@pytest.mark.parametrize("wanted", (True, False))
def test_the_field_holds_while_a_model_is_built(wanted):
    """Bridge's function overwrites it with its own argument before it calls the provider."""
    built = []

    def get_model(provider):
        provider.use_cpu_initialization = False
        provider.provide()

    provider = SimpleNamespace(use_cpu_initialization=wanted)
    provider.provide = lambda: built.append(provider.use_cpu_initialization)
    (replace,) = CPU_WEIGHTS.replaces.values()
    assert replace is drawn_on_the_cpu
    replace(get_model)(provider)
    assert (built, provider.use_cpu_initialization) == ([wanted], wanted)
