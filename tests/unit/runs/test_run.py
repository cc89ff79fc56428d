# SPDX-License-Identifier: Apache-2.0
"""What `tpi train` says at its end."""

import pytest

from tests.ledgers import record, write
from tp_invariant_recipes.ledger.record import Header
from tp_invariant_recipes.ledger.stream import StepsInFile
from tp_invariant_recipes.runs import overview
from tp_invariant_recipes.runs.run import Run

NAN, INFINITE = "f32:7fc00000", "f32:7f800000"


@pytest.mark.parametrize(
    "changes, steps, said",
    (
        ({}, (), None),
        ({2: {"loss": NAN}, 3: {"grad_norm": INFINITE}}, (2, 3), "2 steps"),
        ({3: {"loss": None, "grad_norm": None, "skipped": True}}, (), None),
        ({1: {"grad_norm": NAN}}, (1,), "1 step"),
    ),
)
def test_losses_that_are_no_numbers_are_a_warning(tmp_path, monkeypatch, changes, steps, said):
    write(tmp_path, Header(identity={"model": "toy"}), [record(step, **changes.get(step, {})) for step in (1, 2, 3)])
    monkeypatch.setattr(overview, "row", lambda path: overview.RunRow(path, overview.COMPLETED))
    monkeypatch.setattr(StepsInFile, "all", lambda *_: pytest.fail("all steps in memory"))  # at once
    ended = Run(tmp_path)
    assert ended.not_finite == steps
    warnings = [line for line in ended.lines() if "is NaN or infinite" in line]
    assert len(warnings) == bool(said)
    assert all(f"at {said}, first at step {steps[0]}:" in line for line in warnings)
