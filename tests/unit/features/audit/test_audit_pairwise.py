# SPDX-License-Identifier: Apache-2.0
"""Parts of `tpi audit`: cells that cover each pair of settings once, the reference that it plans."""

from dataclasses import replace
from itertools import combinations

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.audit import reference as audit_reference
from tp_invariant_recipes.features.audit.configurations import MOST, Covering, pairs, shrunk
from tp_invariant_recipes.features.audit.result import (
    BEYOND,
    DIFFERS,
    FAILED,
    NOT_DECIDED,
    NOT_JUDGED,
    WHOLE,
    WITHIN,
    AuditRun,
)

AXES = (
    ("tp=2", "tp=2 sp=false"), ("dp=2",), ("mbs=2",), ("loss",), ("sinks",), ("adam", "muon"), ("masks",), ("eval",),
)  # fmt: skip
LAYOUTS = 3


def covered(allowed=lambda cell: True):
    covering = Covering(AXES, LAYOUTS, allowed)
    cells = []
    while (cell := covering.next()) is not None:
        cells.append(cell)
        covering.cover(cell)
    return covering, cells


def test_each_pair_is_in_a_cell_and_no_cell_has_two_settings_of_an_axis():
    covering, cells = covered()
    wanted = {frozenset(pair) for pair in pairs(AXES)}
    assert {frozenset(pair) for cell in cells for pair in combinations(cell, 2)} >= wanted
    assert not covering.pending
    assert len(cells) < len(wanted) / 2
    for cell in cells:
        assert 1 <= len(cell) <= MOST
        assert all(len(cell & {*axis}) <= 1 for axis in AXES)
        assert covering.changes_layout(cell)


def test_a_cell_that_no_run_may_have_is_not_tried_and_its_pair_is_omitted():
    refused = {frozenset(("sinks", "muon")), frozenset(("tp=2", "eval"))}
    _, cells = covered(lambda cell: not any(pair <= cell for pair in refused))
    assert not any(pair <= cell for cell in cells for pair in refused)
    assert any({"dp=2", "eval"} <= cell for cell in cells)


@pytest.mark.parametrize("cause", ({"tp=2"}, {"tp=2", "sinks"}, {"tp=2", "loss", "muon"}))
def test_a_fault_is_shrunk_to_its_cause(cause):
    cell = frozenset(("tp=2", "loss", "sinks", "muon", "masks"))
    tried = []

    def fails(smaller):
        tried.append(smaller)
        return cause <= smaller

    assert shrunk(cell, fails) == cause
    assert len(tried) == len(cell)


WRONG = AuditRun(("tp=2",), BEYOND, "text", "gradients decoder.layers.1.mlp.experts.7.linear_fc2", 1.0)


def test_one_fault_is_that_of_a_tensor_in_any_layer_and_the_same_known_one():
    assert WRONG.same_fault(replace(WRONG, first="gradients decoder.layers.0.mlp.experts.3.linear_fc2", text="other"))
    assert not WRONG.same_fault(replace(WRONG, first="gradients decoder.layers.1.mlp.experts.7.linear_fc1"))
    assert not WRONG.same_fault(replace(WRONG, known="another fault of the same tensor"))
    assert not WRONG.same_fault(replace(WRONG, verdict=WITHIN))


def test_cells_without_a_fault_are_not_reaudited():
    right, wrong = (WITHIN, NOT_DECIDED, WHOLE, NOT_JUDGED), (BEYOND, DIFFERS, FAILED)
    assert all(replace(WRONG, verdict=verdict).covers for verdict in right)
    assert not any(replace(WRONG, verdict=verdict).covers for verdict in wrong)


def test_any_rank_may_be_the_first_to_fail():
    failed = replace(WRONG, verdict=FAILED, first=None, text="rank 0 failed: RuntimeError: x\nits log: a")
    assert failed.same_fault(replace(failed, text="rank 1 failed: RuntimeError: x\nits log: b"))
    assert not failed.same_fault(replace(failed, text="rank 0 failed: RuntimeError: y"))


def test_a_reference_is_the_simplest_of_what_the_configuration_has():
    config = compose(
        "qwen3_moe_toy",
        ["numerics=stock", "tp=2", "pp=2", "ep=2", "dp=2", "gbs=4", "mbs=2", "ddp.overlap_grad_reduce=true"],
    ).config
    result = audit_reference.overrides(config, [])
    assert {"train.micro_batch_size=1", "ddp.overlap_grad_reduce=false", "sp=false"} <= set(result)
    assert "parallel.data_parallel_size=1" in result
    own = parse_all(["mbs=2", "sp=true"])
    assert not {"train.micro_batch_size=1", "sp=false"} & set(audit_reference.overrides(config, own))
    assert "model.expert_model_parallel_size=4" in audit_reference.overrides(config, [], 4)
    assert audit_reference.overrides(compose("qwen3_toy", ["numerics=stock"]).config, []) == []
    stages = compose("nemotron3_nano_toy", ["pp=2", "gbs=2", "model.hybrid_layer_pattern='MEM|*EME'"]).config
    assert "model.hybrid_layer_pattern=MEM*EME" in audit_reference.overrides(stages, [])


DEFINITIONS = (
    ("qwen3_toy", "dp=2", "numerics.data_shards=2"),
    ("qwen3_toy", "cp=2", "numerics.context_shards=2"),
    ("qwen3_moe_toy", "dp=2", "numerics.expert_groups=2"),
)


@pytest.mark.parametrize("model, word, count", DEFINITIONS)
def test_a_reference_of_invariant_numerics_has_their_definition(model, word, count):
    config = compose(model, ["numerics=tree", word, "gbs=4"]).config
    words = audit_reference.overrides(config, [])
    assert count in words
    assert count not in audit_reference.overrides(config, parse_all([count.replace("2", "1")]))
    name = count.partition("=")[0].partition(".")[2]
    defined = compose(model, ["numerics=tree", "gbs=4", *words]).config
    assert getattr(defined.numerics, name) == getattr(config.numerics, name)
    assert compose(model, ["numerics=tree", "gbs=4"]).config.numerics != defined.numerics
    stock = compose(model, ["numerics=stock", word, "gbs=4"]).config
    assert count not in audit_reference.overrides(stock, [])
