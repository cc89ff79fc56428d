# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's own Linear and LayerNormLinear, as programs without Megatron-Core's wrappers use them.

    parallel_mode      forward here                                    its definition
    "column"           [norm,] x @ weight^T, the weight's rows split   linear.column_parallel, norm.rms_norm, layer_norm
    "row"              x @ weight^T, the weight's columns split        linear.row_parallel
    None               of LayerNormLinear: "column" on one rank
                       of Linear: the output of "row" and the gradients of "column" on one rank, linear.unsplit

A Linear without parallel_mode sums nothing over ranks. Where V does not divide its sizes, or its operands are not
covered, it stays Transformer Engine's.

Parameters, their names and checkpoints stay Transformer Engine's. The rows of a column-parallel weight are segments,
each of which is split on its own: those of `parameters_split`, or `weight.partition_stride` equal ones (Megatron's
attribute; 2 for gate and up, on one rank as well).

This module imports no Transformer Engine: what it replaces is a method of an object that has the attributes named here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.numerics.gemm.operands import Split
from tp_invariant_recipes.numerics.layers import linear
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.norm import NormShards, layer_norm, rms_norm
from tp_invariant_recipes.numerics.megatron.base import ColumnForward, RowForward
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh
from tp_invariant_recipes.replacement import Replacement

TE = "transformer_engine.pytorch"
LINEAR, NORM_LINEAR = "Linear", "LayerNormLinear"
Refuse = Callable[[list[str]], None]

# Arguments of which every value is covered.
ANY = (
    "self", "in_features", "out_features", "eps", "bias", "tp_group", "tp_size", "parallel_mode", "sequence_parallel",
    "parameters_split", "fuse_wgrad_accumulation", "init_method", "get_rng_state_tracker", "rng_tracker_name", "device",
    "ub_name", "name", "return_layernorm_output",
)  # fmt: skip
_USERBUFFERS = "userbuffers add up what arrives first"


@dataclass(frozen=True)
class Allowed:
    """The values of an argument that are covered, the first of them to advise, and why others are not."""

    values: tuple[Any, ...]
    why: str


ONLY = {
    "params_dtype": Allowed(
        (torch.bfloat16, torch.float32, None), "GEMMs are defined for weights in bfloat16 and float32"
    ),
    "normalization": Allowed(("RMSNorm", "LayerNorm"), "another norm has no invariant version"),
    "zero_centered_gamma": Allowed((False,), "norm weights around zero have no invariant version"),
    "return_bias": Allowed((False,), "the gradient of a bias that is added later is summed elsewhere"),
    "return_layernorm_output_gathered": Allowed((False,), "the gradient of a gathered output is summed elsewhere"),
    "delay_wgrad_compute": Allowed((False,), "weight gradients are computed in the backward pass"),
    "symmetric_ar_type": Allowed((None,), "it adds in an order of its own"),
    "ub_overlap_ag": Allowed((False,), _USERBUFFERS),
    "ub_overlap_rs": Allowed((False,), _USERBUFFERS),
    "ub_overlap_rs_dgrad": Allowed((False,), _USERBUFFERS),
    "ub_bulk_dgrad": Allowed((False,), _USERBUFFERS),
    "ub_bulk_wgrad": Allowed((False,), _USERBUFFERS),
}
MODES = {LINEAR: ("column", "row", None), NORM_LINEAR: ("column", None)}
# Modules that sum over ranks, or launch kernels whose sums depend on what a rank holds, and Megatron-Core's subclasses
# of them that numerics/megatron/spec.py covers.
OTHERS = {
    f"{TE}:LayerNormMLP": None,
    f"{TE}:TransformerLayer": None,
    f"{TE}:MultiheadAttention": None,
    f"{TE}:GroupedLinear": "TEGroupedLinear",
    f"{TE}:DotProductAttention": "TEDotProductAttention",
    f"{TE}.ops:BasicLinear": None,
}


def replacements(shards: int, refuse: Refuse) -> tuple[Replacement, ...]:
    """Rows that make Transformer Engine's modules invariant with V = `shards`, or refuse them when they are built.

    refuse: raises for the problems that it is given, unless there are none.
    """
    rows = []
    for kind in (LINEAR, NORM_LINEAR):
        why = "sums over ranks depend on tp"
        rows += [
            Replacement(f"{TE}:{kind}.__init__", partial(_checked, kind, shards, refuse), why),
            Replacement(f"{TE}:{kind}.forward", partial(_forward, kind, shards, refuse), why),
        ]
    rows += [
        Replacement(f"{target}.__init__", partial(_refused, target, own, refuse), "it has no invariant version")
        for target, own in OTHERS.items()
    ]
    return tuple(rows)


def built_problems(kind: str, given: dict[str, Any], defaults: Signature, shards: int) -> list[str]:
    """List what of a module's arguments is not covered, each with what to change.

    given: all arguments by name. defaults: of the constructor.
    """
    return [*_argument_problems(given, defaults), *_split_problems(kind, given, shards)]


def _argument_problems(given: dict[str, Any], defaults: Signature) -> Iterator[str]:
    for name, value in given.items():
        rule = ONLY.get(name)
        # 0 is not False here, and a tensor is equal to nothing.
        if rule is not None and not any(
            value is known or (type(value) is type(known) and value == known) for known in rule.values
        ):
            yield f"{name}={value}: {rule.why}; {name}={rule.values[0]}"
        elif rule is None and name not in ANY and value is not (default := defaults.parameters[name].default):
            yield f"{name}={value}: the invariant numerics do not know this argument; {name}={default}"


def _split_problems(kind: str, given: dict[str, Any], shards: int) -> Iterator[str]:
    mode, tp = given["parallel_mode"], given["tp_size"]
    if given["tp_group"] is not None:
        tp = given["tp_group"].size()
    if mode not in MODES[kind]:
        covered = " or ".join(map(str, MODES[kind]))
        yield f"parallel_mode={mode}: {kind} is covered with parallel_mode={covered} only"
    if mode is None and given["sequence_parallel"] and tp > 1:
        yield "sequence_parallel=True without parallel_mode: each rank would sum its own tokens"
    if shards % tp:
        yield f"tp_size={tp} does not divide the {shards} virtual shards (TPI_SHARDS)"
    if mode == "column" or (mode is None and kind == NORM_LINEAR):
        yield from _not_divided(_split_sizes(given), shards)
    if mode == "row" and given["in_features"] % shards:
        yield f"in_features={given['in_features']}: {shards} virtual shards (TPI_SHARDS) do not divide it"


def _split_sizes(given: dict[str, Any]) -> list[int]:
    split, rows = given["parameters_split"], given["out_features"]
    if not split:
        return [rows]
    return list(split.values()) if isinstance(split, dict) else [rows // len(split)] * len(split)


def _not_divided(sizes: list[int], shards: int) -> list[str]:
    wrong = sorted({size for size in sizes if size % shards})
    return [f"out_features: {shards} virtual shards (TPI_SHARDS) do not divide a matrix of {n} rows" for n in wrong]


def _fp8() -> bool:
    """Whether FP8 is on here: for the parameters that are made, or for the products."""
    manager = import_module(f"{TE}.quantization").FP8GlobalStateManager
    return bool(manager.with_fp8_parameters() or manager.is_fp8_enabled())


def _checked(kind: str, shards: int, refuse: Refuse, original: Any) -> Any:
    parameters = signature(original)

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, ColumnForward | RowForward):
            call = parameters.bind(self, *args, **kwargs)
            call.apply_defaults()
            problems = built_problems(kind, call.arguments, parameters, shards)
            if _fp8():
                problems.append("FP8: sums over ranks are defined for bfloat16 and float32 only; build it outside")
            refuse([f"transformer_engine {kind}: {problem}" for problem in problems])
        original(self, *args, **kwargs)

    return __init__


def _refused(target: str, own: str | None, refuse: Refuse, original: Any) -> Any:
    name = target.partition(":")[2]

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if own is None or own not in [base.__name__ for base in type(self).__mro__]:
            refuse([f"transformer_engine {name} has no invariant version; only {LINEAR} and {NORM_LINEAR} have"])
        original(self, *args, **kwargs)

    return __init__


def _forward(kind: str, shards: int, refuse: Refuse, original: Any) -> Any:
    parameters = signature(original)

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(self, *args, **kwargs)
        weights = [getattr(self, name) for name in self.weight_names]
        problems = _run_problems(self, call.arguments, weights, shards)
        sums_nothing = self.parallel_mode is None and kind == LINEAR
        if sums_nothing and (problems or self.in_features % shards):
            return original(self, *args, **kwargs)
        refuse([f"transformer_engine {kind}: {problem}" for problem in problems])
        return _computed(self, kind, call.arguments["inp"], weights, shards)

    return forward


def _computed(module: Any, kind: str, x: Tensor, weights: list[Tensor], shards: int) -> Any:
    """Return the output of a module of `kind`, and the norm's result beside it where the module returns that."""
    alone = module.parallel_mode is None or module.tp_size == 1
    mesh = VirtualMesh(shards, 1, 0) if alone else VirtualMesh.from_group(shards, module.tp_group)
    normal = _normal(module, x, mesh) if kind == NORM_LINEAR else x
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    y = _product(module, kind, normal, weight, _segments(weights), mesh)
    if y.requires_grad:
        y.register_hook(Tensor.contiguous)  # that of a sum is one number, seen as many
    return (y, normal) if kind == NORM_LINEAR and module.return_layernorm_output else y


def _product(module: Any, kind: str, x: Tensor, weight: Tensor, segments: Split, mesh: VirtualMesh) -> Tensor:
    """x @ weight^T, and the module's bias."""
    bias, sliced = _bias(module), module.sequence_parallel
    if module.parallel_mode == "row":
        y = linear.row_parallel(x, weight, mesh, sliced)
        return y if bias is None else row_bias(y, bias, mesh, sliced)
    if module.parallel_mode is None and kind == LINEAR:
        y = linear.unsplit(x, weight, mesh, segments)
    else:
        y = linear.column_parallel(x, weight, mesh, segments, sliced and module.parallel_mode is not None)
    return y if bias is None else column_bias(y, bias)


def _normal(module: Any, x: Tensor, mesh: VirtualMesh) -> Tensor:
    """Return the norm of LayerNormLinear, of x's shape and dtype."""
    sliced = module.sequence_parallel and mesh.size > 1
    if module.normalization == "LayerNorm":
        return layer_norm(x, module.layer_norm_weight, module.layer_norm_bias, module.eps, mesh, sliced)
    rows = NormShards.SEQUENCE_SLICE if sliced else NormShards.SEQUENCE_WHOLE
    return rms_norm(x, module.layer_norm_weight, module.eps, mesh, rows)


def _segments(weights: list[Tensor]) -> Split:
    if len(weights) > 1:
        return tuple(weight.shape[0] for weight in weights)
    return getattr(weights[0], "partition_stride", 1)


def _bias(module: Any) -> Tensor | None:
    if not module.use_bias:
        return None
    biases = [getattr(module, name) for name in module.bias_names]
    return biases[0] if len(biases) == 1 else torch.cat(biases)


def _run_problems(module: Any, given: dict[str, Any], weights: list[Tensor], shards: int) -> list[str]:
    x = given["inp"]
    problems = []
    if _fp8() or given.get("fp8_output") or given.get("fp8_grad"):
        problems.append("FP8: sums over ranks are defined for bfloat16 and float32 only; leave autocast out")
    problems += _gradient_problems(module, given, weights)
    if torch.is_autocast_enabled(x.device.type) or any(weight.dtype != x.dtype for weight in weights):
        dtypes = f"input {x.dtype}, weight {weights[0].dtype}"
        problems.append(f"{dtypes}: nothing is cast; give both one dtype, and leave torch.autocast out")
    if module.parallel_mode != "row":
        sizes = [len(weight) * (module.tp_size if module.parallel_mode else 1) for weight in weights]
        stride = getattr(weights[0], "partition_stride", 1) if len(weights) == 1 else 1
        problems += _not_divided([size // stride for size in sizes], shards)
    return problems


def _gradient_problems(module: Any, given: dict[str, Any], weights: list[Tensor]) -> Iterator[str]:
    if given.get("is_first_microbatch") and module.fuse_wgrad_accumulation:
        yield "is_first_microbatch=True: weight gradients are added; zero main_grad, and leave it out"
    if any(getattr(weight, "overwrite_main_grad", False) for weight in weights):
        yield "overwrite_main_grad: weight gradients are added; zero main_grad, and leave it out"
    main_grads = [weight.main_grad for weight in weights if hasattr(weight, "main_grad")]
    if any(main_grad.dtype != torch.float32 for main_grad in main_grads):
        yield "main_grad: weight gradients are added up in fp32; give it dtype torch.float32"
