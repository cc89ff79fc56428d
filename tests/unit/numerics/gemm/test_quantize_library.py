# SPDX-License-Identifier: Apache-2.0
"""What the quantizers ask of Transformer Engine is what 2.12 has too."""

import sys
from types import ModuleType, SimpleNamespace

import torch

from tp_invariant_recipes.numerics.gemm import quantize


def test_data_types_are_those_of_the_compiled_module(monkeypatch):
    library = SimpleNamespace(DType=SimpleNamespace(kFloat8E4M3=7, kFloat8E5M2=8))
    monkeypatch.setattr(quantize, "_library", lambda: library)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.constants", ModuleType("constants"))
    assert quantize._names.__wrapped__() == {torch.float8_e4m3fn: 7, torch.float8_e5m2: 8}
