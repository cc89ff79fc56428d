# SPDX-License-Identifier: Apache-2.0
"""Tests of one function or module at a time, which do without Megatron-Bridge: importing it takes 10 to 20 s.

A test that needs Bridge belongs in tests/distributed, where each worker imports it once.
"""

import sys
from typing import Any, NoReturn

import pytest

from tp_invariant_recipes.settings import field_table
from tp_invariant_recipes.start import bridge as host_bridge

BRIDGE = "megatron.bridge"


@pytest.fixture(autouse=True)
def _no_bridge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Fail a test that imports Megatron-Bridge, also where a worker has it from a test of another folder."""

    def refuse() -> NoReturn:
        pytest.fail(f"{request.node.nodeid} asks for Megatron-Bridge, so it belongs in tests/distributed")

    monkeypatch.setattr(host_bridge, "load", refuse)
    before = BRIDGE in sys.modules
    yield
    if BRIDGE in sys.modules and not before:
        refuse()


@pytest.fixture(autouse=True)
def _fields_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of Bridge's fields, as it is of the Bridge that the locks install, whatever is installed.

    tests/distributed/bridge/test_catalogue_drift.py compares it with Bridge.
    """
    monkeypatch.setattr(field_table, "_digest", field_table.table()[0].get)


@pytest.fixture
def models_table() -> list[dict[str, Any]]:
    """What `tpi models` shows; test_model_table.py holds it to the models as they compose."""
    return field_table.rows()
