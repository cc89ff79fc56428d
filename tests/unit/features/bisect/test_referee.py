# SPDX-License-Identifier: Apache-2.0
"""`tpi bisect --referee`: who is right, by repetition first, then by a CPU that computes the operation."""

from types import SimpleNamespace

import pytest

from tp_invariant_recipes.errors import LedgerError
from tp_invariant_recipes.features.bisect import recompute

NAMES, MODULE, OPERATION = ("monday", "tuesday"), "decoder.layers.0.mlp.linear_fc2", "the forward pass of it"


def judged(repeats, identical=(), module=MODULE, operation=OPERATION, step=3, monkeypatch=None):
    """right: the runs whose dumps a CPU confirms."""
    if monkeypatch is not None:
        monkeypatch.setattr(
            recompute, "check", lambda run, step, module: SimpleNamespace(exit_status=int(run not in identical))
        )
    return recompute.referee(NAMES, repeats, module, operation, step, lambda names, since: NAMES)


def test_of_two_runs_the_one_that_repeats_its_bits_is_correct():
    result = judged((False, True))
    assert result.right == ("b",)
    assert result.text == "referee: tuesday is right: it repeats its bits here, and monday does not"


@pytest.mark.parametrize(
    "identical, sides, says",
    (
        (("monday",), ("a",), "monday is right, and tuesday is wrong, by the definition of decoder"),
        (NAMES, ("a", "b"), "both runs are right, by the definition"),
        ((), (), "neither run is right, by the definition"),
    ),
)
def test_where_both_repeat_a_cpu_computes_the_operation(monkeypatch, identical, sides, says):
    result = judged((True, True), identical, monkeypatch=monkeypatch)
    assert result.right == sides
    assert says in result.text


@pytest.mark.parametrize("module, operation", ((None, OPERATION), (MODULE, None)))
def test_without_an_operation_there_is_nothing_to_judge(module, operation):
    assert "nothing to judge" in judged((True, True), module=module, operation=operation).text


def test_an_operation_that_no_cpu_computes_has_no_referee(monkeypatch):
    assert "it cannot tell: --module decoder.final_layernorm is not covered" in (
        judged((True, True), module="decoder.final_layernorm").text
    )

    def not_dumped(run, step, module):
        raise LedgerError("monday did not dump it")

    monkeypatch.setattr(recompute, "check", not_dumped)
    assert judged((True, True)).text == "referee: it cannot tell: monday did not dump it"
