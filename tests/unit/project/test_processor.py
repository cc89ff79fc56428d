# SPDX-License-Identifier: Apache-2.0
"""The ledger's `instructions` are those that oneDNN itself reports, with and without the caps of the environment."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from tp_invariant_recipes.machine import processor
print(processor.capability())
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
    torch.nn.functional.conv2d(torch.ones(4, 64, 32, 32), torch.ones(64, 64, 3, 3))
"""
# What oneDNN's lines for people call its kinds.
SHOWN = {"Intel SSE4.1": "SSE41", "Intel AVX": "AVX", "Intel AVX2": "AVX2"}


@pytest.mark.release
@pytest.mark.parametrize("cap", (None, "SSE41", "AVX2"))
def test_the_ledger_names_what_onednn_takes(cap):
    variables = {**os.environ, "ONEDNN_VERBOSE": "1"} | ({"ONEDNN_MAX_CPU_ISA": cap} if cap else {})
    shown = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
    (kind,) = re.findall(r"cpu,isa:(.*)", shown.stdout)
    if kind.startswith("Intel AVX-512"):
        assert "oneDNN AVX512_CORE" in shown.stdout
    else:
        assert f"oneDNN {SHOWN[kind]}, MKL" in shown.stdout
