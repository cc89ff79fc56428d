"""Tests of one function or module at a time, which do without Megatron-Bridge: importing it takes 10 to 20 s.

A test that needs Bridge belongs in tests/distributed, where each worker imports it once.
"""

import fcntl
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tp_invariant_recipes.config import describe
from tp_invariant_recipes.host import bridge as host_bridge
from tp_invariant_recipes.settings import field_table

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
    """The table of Bridge's fields, as it is of the Bridge that the locks install.

    tests/distributed/test_field_table_bridge.py compares it with Bridge.
    """
    monkeypatch.setattr(field_table, "in_environment", field_table.of_the_locks)


@functools.cache
def _models(folder: Path) -> list[dict[str, Any]]:
    with (folder / "models.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / "models.json"
        if not kept.exists():
            kept.write_text(json.dumps(describe.models()))
        return json.loads(kept.read_text())


@pytest.fixture
def models_table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `tpi models` shows, composed once a session."""
    own = tmp_path_factory.getbasetemp()
    return _models(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
