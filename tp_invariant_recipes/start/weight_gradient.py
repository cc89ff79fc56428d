# SPDX-License-Identifier: Apache-2.0
"""Stands in for Apex's extension `fused_weight_gradient_mlp_cuda`, which is on no registry.

Megatron-Core calls it for layers that are not Transformer Engine's, such as the output layer, where a model has
`gradient_accumulation_fusion`. Transformer Engine's GEMM does the same: it adds to an fp32 gradient.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "fused_weight_gradient_mlp_cuda"


def provide() -> None:
    """Make the extension importable where it is not installed. Idempotent."""
    if NAME not in sys.modules and find_spec(NAME) is None:
        sys.modules[NAME] = module = ModuleType(NAME)
        vars(module).update(wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate)


def _accumulate(x: Any, dy: Any, main_grad: Any) -> None:
    """Add a weight's gradient in place. x: [tokens, in], dy: [tokens, out], in bf16. main_grad: [out, in], fp32."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(x, dy, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True)
