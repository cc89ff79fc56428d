# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Apex's extension adds a weight's gradient in place."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from tp_invariant_recipes.start import bridge

EXTENSION = "transformer_engine.pytorch.cpp_extensions"


def general_gemm(x, dy, *, out_dtype, layout, out, accumulate, grad):
    """As Transformer Engine's: "NT" is the second operand, transposed, times the first."""
    assert (layout, accumulate, grad, out_dtype) == ("NT", True, True, out.dtype)
    out.add_(dy.t().to(out_dtype) @ x.to(out_dtype))


@pytest.mark.parametrize(
    "name, dtype", (("wgrad_gemm_accum_fp32", torch.float32), ("wgrad_gemm_accum_fp16", torch.bfloat16))
)
def test_a_gradient_is_added_to_the_buffer(monkeypatch, name, dtype):
    monkeypatch.delitem(sys.modules, bridge.APEX, raising=False)
    for package in ("transformer_engine", "transformer_engine.pytorch", EXTENSION):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    sys.modules[EXTENSION].general_gemm = general_gemm
    bridge.provide_weight_gradients()
    x, dy, main_grad = torch.ones(3, 4).bfloat16(), torch.ones(3, 2).bfloat16(), torch.ones(2, 4, dtype=dtype)
    getattr(import_module(bridge.APEX), name)(x, dy, main_grad)
    assert torch.equal(main_grad, torch.full((2, 4), 4.0, dtype=dtype))


def test_an_installed_extension_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, bridge.APEX, installed := ModuleType(bridge.APEX))
    bridge.provide_weight_gradients()
    assert sys.modules[bridge.APEX] is installed
