# SPDX-License-Identifier: Apache-2.0
"""A mode is one value: a file and a row make a new arithmetic, which trains, is refused and is recorded by its name."""

from types import SimpleNamespace
from typing import Literal, get_args, get_type_hints

import pytest
import torch

from tests.distributed.scenario import unequal
from tests.distributed.small_models import SHORTEST
from tests.operands import same_bits
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.megatron.base import ColumnForward, RowForward
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.settings import schema

SEGMENTS = 2


def test_every_mode_is_a_value_of_its_key():
    assert {*mode.NAMES} == {*get_args(get_type_hints(NumericsSettings)["mode"])}
    assert [item.name for item in mode.every()] == [*mode.MODES]
    for name in mode.MEGATRONS:
        assert mode.find(name) is None
        assert not NumericsSettings(name).covers(mode.EXPERTS)


def _with_toy() -> None:
    """Add the row, after the values of the key have been read from the table."""
    mode.MODES["toy"] = "tests.toy_mode:MODE"
    NumericsSettings.__annotations__["mode"] = Literal[(*mode.MEGATRONS, *mode.MODES)]
    schema.fields.cache_clear()


@pytest.fixture
def toy(monkeypatch):
    """The row, for one test."""
    monkeypatch.setitem(mode.MODES, "toy", "tests.toy_mode:MODE")
    yield
    mode.find.cache_clear()


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("name", (*mode.MODES, "toy"))
def test_a_layer_multiplies_as_its_mode_does(name):
    generator = torch.Generator().manual_seed(5)
    x, dy, weight = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 1, 40), (16, 1, 48), (48, 40))
    )
    # Sums over n that cancel: what is left is the rounding of each order.
    half, order = dy.shape[-1] // 2, torch.randperm(dy.shape[-1], generator=torch.Generator().manual_seed(1))
    dy = torch.cat([dy[..., :half]] * 2, dim=-1)[..., order]
    weight = torch.cat([weight[:half], -weight[:half]])[order]
    config, mesh = SimpleNamespace(invariant_mode=name, sequence_parallel=False), VirtualMesh(4, 1, 0)
    column, row = ColumnForward.__new__(ColumnForward), RowForward()
    column.segments = SEGMENTS
    for layer in (column, row):
        layer.config, layer.mesh = config, mesh
    operands = {item: mode.find(item).operands() for item in mode.MODES}
    expected = linear.column_parallel(x, weight, mesh, SEGMENTS, False, operands[name])
    assert same_bits(column.column(x, weight, None), expected)
    results = {operand: linear.row_parallel(dy, weight.t(), mesh, False, operands[operand]) for operand in operands}
    assert [operand for operand in operands if same_bits(row.row(dy, weight.t(), None), results[operand])] == [name]


def test_a_row_makes_a_mode_that_trains_in_every_layout(scenario):
    """Stock, whose bits change with tp, is test_invariance.py's control."""
    toy = scenario(SHORTEST, "numerics.mode=toy").planted(_with_toy)
    single = toy("tp=1").ledger()
    assert unequal(toy("tp=2").ledger(), single) == []
    assert unequal(scenario(SHORTEST, "tp=1").ledger(), single)


def test_what_a_new_mode_does_not_cover_is_refused_by_its_name(tpi):
    done = tpi("train", "qwen3_moe_toy", "numerics.mode=toy", "seq=16", "gbs=2", before=_with_toy)
    assert done.status == 2
    assert "numerics=toy: experts are covered by numerics=tree and numerics=portable only" in done.stderr
