# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a model: kinds, and one row a module that can be captured. check/cuda_graphs.py has their rules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.model_shape import ModelShape
from tp_invariant_recipes.settings.run_config import RunConfig

Model = Mapping[str, Any]

TE, FULL = "transformer_engine", "full_iteration"
IMPLEMENTATIONS = {TE: "te", FULL: "full"}


def requested(model: Model) -> bool:
    """Whether a model's configuration has CUDA graphs of any kind."""
    return model.get("cuda_graph_impl") not in (None, "none")


@dataclass(frozen=True)
class Module:
    """A part of a layer that Transformer Engine's graphs can capture.

    name:    its name in `model.cuda_graph_modules`.
    problem: the reason why it cannot be captured in a model, with the key to change; None: it can.
    default: whether it is captured by default, if it can be.
    """

    name: str
    problem: Callable[[Model], str | None]
    default: Callable[[Model], bool] = lambda model: True
    invariant: bool = True


def graphed_modules(model: Model, invariant: bool) -> list[str]:
    """Return the modules that `cuda_graph=te` captures of a model by default. invariant: whether numerics are."""
    fit = (module for module in MODULES if module.problem(model) is None and module.default(model))
    return [module.name for module in fit if module.invariant or not invariant]


def padded(model: Model) -> bool:
    """Whether every expert gets the same number of tokens at every step, so that its products can be replayed."""
    return model.get("moe_expert_capacity_factor") is not None and bool(model.get("moe_pad_expert_input_to_capacity"))


def rows_of_experts(config: RunConfig) -> float:
    """Return how many times the rows of evenly spread tokens experts may have in a graph of a whole invariant step.

    As many as any choice of experts needs; most steps need fewer (numerics/megatron/graph_room.py).
    """
    experts, topk = config.shape.experts, config.model.get("moe_router_topk") or 2
    if config.model.get("cuda_graph_impl") != FULL or not config.numerics.invariant or experts <= 1:
        return 1.0
    owners = max(config.layout.tp, config.layout.ep)
    return min(owners * min(topk, experts // owners) / topk, config.model.get("moe_expert_capacity_factor") or math.inf)


def _layers(model: Model, kind: str) -> bool:
    return kind in ModelShape(model).pattern.partition("/")[0]


def has_experts(model: Model) -> bool:
    """Whether a captured layer would have several experts."""
    return ModelShape(model).experts > 1


def attention_problem(model: Model) -> str | None:
    """Why attention cannot be captured in a model; None: it can."""
    return "this model has no attention layers" if ModelShape(model).pattern and not _layers(model, "*") else None


def _mlp(model: Model) -> str | None:
    frequency = ModelShape(model).expert_layers
    if has_experts(model) and (frequency == 1 or (isinstance(frequency, list) and 0 not in frequency)):
        return "for dense layers, of which this model has none"
    dense = not ModelShape(model).pattern or _layers(model, "-")
    return None if dense else "for dense layers, of which this model has none"


def _moe(model: Model) -> str | None:
    if not has_experts(model):
        return "this model has no experts"
    if padded(model):
        return None
    return (
        "experts get another number of tokens at every step; pad them: model.moe_expert_capacity_factor=1.0 "
        "model.moe_pad_expert_input_to_capacity=true, or capture moe_router and moe_preprocess"
    )


def _preprocess(model: Model) -> str | None:
    if not has_experts(model):
        return "this model has no experts"
    waits = model.get("moe_expert_capacity_factor") is not None or model.get("moe_router_padding_for_fp8")
    if padded(model) or model.get("moe_token_dispatcher_type") != "alltoall" or not waits:
        return None
    return (
        "waits for numbers from the GPU; model.moe_expert_capacity_factor=null and "
        "model.moe_router_padding_for_fp8=false, or leave moe_preprocess out"
    )


MODULES = (
    Module("attn", attention_problem),
    Module("mamba", lambda model: None if _layers(model, "M") else "this model has no Mamba layers"),
    Module("mlp", _mlp),
    Module("moe", _moe, invariant=False),
    Module("moe_router", lambda model: None if has_experts(model) else "this model has no experts",
        default=lambda model: not padded(model)),
    Module("moe_preprocess", _preprocess, default=lambda model: not padded(model), invariant=False),
)  # fmt: skip
BY_NAME = {module.name: module for module in MODULES}
NOT_INVARIANT = tuple(module.name for module in MODULES if not module.invariant)
