# SPDX-License-Identifier: Apache-2.0
"""The run that the tests here kill, stop, damage and continue, as it is when nothing interrupts it."""

from pathlib import Path

import pytest

from tests.distributed.small_models import SAVED


@pytest.fixture(scope="session")
def whole(scenario) -> Path:
    """The run directory of SAVED, of four steps. Copy it before you change it."""
    run = scenario(*SAVED)
    run.ledger()
    return run.run
