# SPDX-License-Identifier: Apache-2.0
"""Stands for Transformer Engine where it cannot run: Linear and LayerNormLinear of its constructor and attributes.

Their stock forward is Megatron-Core's: partial products in the weights' dtype, added up by the group.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = SimpleNamespace(with_fp8_parameters=lambda: False, is_fp8_enabled=lambda: False)


class _Base(torch.nn.Module):
    """What both modules have in common."""

    def make(
        self, in_features, out_features, sequence_parallel, tp_group, tp_size, bias, params_dtype, parallel_mode,
        parameters_split, fuse_wgrad_accumulation,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else tp_group.size()
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        names = [f"{part}_" for part in parameters_split] if parameters_split else [""]
        self.weight_names = [f"{part}weight" for part in names]
        self.bias_names = [f"{part}bias" for part in names]
        rows = self.out_features // len(names)
        for weight, its_bias in zip(self.weight_names, self.bias_names, strict=True):
            self.register_parameter(weight, _parameter(rows, self.in_features, dtype=params_dtype))
            if bias:
                self.register_parameter(its_bias, _parameter(rows, dtype=params_dtype))

    def gemm(self, x: Tensor) -> Tensor:
        """Its forward without a norm."""
        from megatron.core import tensor_parallel as tp

        weight = torch.cat([getattr(self, name) for name in self.weight_names])
        bias = torch.cat([getattr(self, name) for name in self.bias_names]) if self.use_bias else None
        if self.tp_size == 1:
            return F.linear(x, weight, bias)
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                x = tp.gather_from_sequence_parallel_region(x, group=self.tp_group)
            else:
                x = tp.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
            return F.linear(x, weight, bias)
        partial = F.linear(x, weight)
        if self.sequence_parallel:
            y = tp.reduce_scatter_to_sequence_parallel_region(partial, group=self.tp_group)
        else:
            y = tp.reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)
        return y if bias is None else y + bias


class Linear(_Base):
    """As transformer_engine.pytorch.Linear of 2.20."""

    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ) -> None:  # fmt: skip
        self.make(
            in_features, out_features, sequence_parallel, tp_group, tp_size, bias, params_dtype, parallel_mode,
            parameters_split, fuse_wgrad_accumulation,
        )  # fmt: skip

    def forward(self, inp: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False) -> Tensor:
        """[s/t or s, b, k] or [s, b, k/t] → [s, b, n/t] or [s/t or s, b, n]."""
        return self.gemm(inp)


class LayerNormLinear(_Base):
    """As transformer_engine.pytorch.LayerNormLinear of 2.20."""

    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ) -> None:  # fmt: skip
        self.make(
            in_features, out_features, sequence_parallel, tp_group, tp_size, bias, params_dtype, parallel_mode,
            parameters_split, fuse_wgrad_accumulation,
        )  # fmt: skip
        self.eps, self.normalization, self.return_layernorm_output = eps, normalization, return_layernorm_output
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype)
        self.layer_norm_bias = None if normalization == "RMSNorm" else _parameter(in_features, dtype=params_dtype)

    def forward(self, inp: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False) -> Any:
        """[s/t or s, b, k] → [s, b, n/t], and the norm's result beside it where it is returned."""
        shape, weight = inp.shape[-1:], self.layer_norm_weight
        if self.layer_norm_bias is None:
            normal = F.rms_norm(inp, shape, weight, self.eps)
        else:
            normal = F.layer_norm(inp, shape, weight, self.layer_norm_bias, self.eps)
        y = self.gemm(normal)
        return (y, normal) if self.return_layernorm_output else y


def _parameter(*shape: int, dtype: torch.dtype | None) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


class _Plain(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def install() -> ModuleType:
    """Have `import transformer_engine.pytorch` find the stand-in, in this process for good. returns: it."""
    names = ("LayerNormMLP", "TransformerLayer", "MultiheadAttention", "GroupedLinear", "DotProductAttention")
    others = {name: type(name, (_Plain,), {"__init__": lambda self, *a, **k: None}) for name in names}
    basic = type("BasicLinear", (_Plain,), {"__init__": lambda self, *a, **k: None})
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear, **others},
        "transformer_engine.pytorch.ops": {"BasicLinear": basic},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": FP8},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module
    return sys.modules["transformer_engine.pytorch"]
