# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels without a GPU. One process runs all of `interpreted.py`, since importing Triton takes longest."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kernel_table
from tests.unit.kernels import interpreted

# The interpreter takes seconds for each of these; SwiGLU stands for them in `make test`.
LONG = {
    *kernel_table.TWINS.keys()
    - {"tree_add", "row_sum", "row_add", "portable SwiGLU", "portable functions", "MXFP8", "message digests"},
    "parts_are_parts_of_the_whole",
    "the_gated_delta_rule_is_correct_shard_by_shard",
    "samples_of_a_gated_delta_net_are_computed_as_if_alone",
    "portable_attention_of_more_shapes_has_the_bits_of_its_twin",
    "portable_attention_to_cached_keys_has_the_bits_of_its_twin",
}


@functools.cache
def _failures(names: tuple[str, ...]) -> dict[str, str | None]:
    """What went wrong with each kernel."""
    done = subprocess.run(
        [sys.executable, "-m", interpreted.__name__, *names],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.release) if n in LONG else n for n in interpreted.KERNELS]
)
def test_kernel(name):
    alike = tuple(other for other in interpreted.KERNELS if (other in LONG) == (name in LONG))
    assert _failures(alike)[name] is None, _failures(alike)[name]


def test_the_long_ones_exist():
    assert interpreted.KERNELS.keys() >= LONG
