"""The Triton kernels without a GPU. One process runs all of `interpreted.py`, since importing Triton takes longest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import interpreted


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    """What went wrong with each kernel."""
    done = subprocess.run(
        [sys.executable, "-m", interpreted.__name__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", interpreted.KERNELS)
def test_kernel(found, name):
    assert found[name] is None, found[name]
