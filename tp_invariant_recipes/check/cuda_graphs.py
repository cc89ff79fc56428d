# SPDX-License-Identifier: Apache-2.0
"""The rules of CUDA graphs.

They are those of Megatron-Core 0.19.2 (`TransformerConfig.__post_init__`, `TECudaGraphHelper`) and Megatron-Bridge
0.6.2 (`validate_cuda_graph_configuration`), which report one failed assertion at a time, some only on the GPU.
"""

import os
from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.check.rule import Rule
from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.settings.cuda_graphs import (
    BY_NAME,
    FULL,
    IMPLEMENTATIONS,
    TE,
    attention_problem,
    graphed_modules,
    has_experts,
    padded,
)
from tp_invariant_recipes.settings.run_config import RunConfig


def _checked(path: str) -> Callable[[RunConfig], bool]:
    """Whether a check is on; it is on by default."""
    return lambda config: config.at(path) is not False


def _captures(config: RunConfig, *names: str) -> bool:
    modules = config.model.get("cuda_graph_modules")
    return isinstance(modules, list) and any(name in modules for name in names)


def _recomputes_experts(config: RunConfig) -> bool:
    model = config.model
    return model.get("recompute_granularity") == "selective" and "moe" in (model.get("recompute_modules") or ())


def _uneven_attention(config: RunConfig) -> bool:
    """Whether cuDNN's attention is captured on such a number of tokens. `portable` has an attention of its own."""
    model, arithmetic = config.model, config.numerics.arithmetic
    if config.shape.sequence % TOKENS == 0 or (arithmetic is not None and arithmetic.any_machine):
        return False
    captured = model.get("cuda_graph_impl") == FULL or _captures(config, "attn")
    return captured and attention_problem(model) is None and model.get("attention_backend") not in ("unfused", "local")


def _expandable(config: RunConfig) -> bool:
    variables = config.cluster.environment | dict(os.environ)
    allocator = variables.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:True" in allocator and variables.get("NCCL_GRAPH_REGISTER") != "0"


# Replayed on sequences of 32 or 64 tokens, graphs of cuDNN 9.19's attention gave other losses, NaN or an illegal memory
# access on an H100, under stock numerics too. On 128, 512, 2048 and 4096 they have the bits of eager execution; no
# length that 128 does not divide has been seen.
TOKENS = 128

# Fields of earlier versions with the same meaning; Core would silently copy their values.
REPLACED = ("cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph")


def _implementation(config: RunConfig) -> str:
    return config.model.get("cuda_graph_impl") or "none"


def _option(config: RunConfig) -> str:
    return f"cuda_graph={IMPLEMENTATIONS[_implementation(config)]}"


def _replaced(config: RunConfig) -> list[Problem]:
    given = {name: config.model.get(name) for name in REPLACED}
    return [
        Problem(f"model.{name}={value}", "cuda_graph=te or cuda_graph=full instead")
        for name, value in given.items()
        if value
    ]


def _unknown(config: RunConfig) -> Problem | None:
    name = _implementation(config)
    if name in ("none", *IMPLEMENTATIONS):
        return None
    return Problem(f"model.cuda_graph_impl={name}", "cuda_graph=off, cuda_graph=te or cuda_graph=full")


def _warmup(config: RunConfig) -> Problem | None:
    """Without a preceding step, Transformer Engine captures layers before their lazy state exists."""
    steps = config.model.get("cuda_graph_warmup_steps", 3)
    if type(steps) is int and steps >= 1:
        return None
    return Problem(f"model.cuda_graph_warmup_steps={steps}", "must be a number of steps, at least 1")


def _modules(config: RunConfig) -> list[Problem]:
    """Return what is wrong with the modules to capture."""
    model, modules = config.model, config.model.get("cuda_graph_modules")
    fits = ",".join(graphed_modules(model, config.numerics.invariant))
    if not isinstance(modules, list) or not modules:
        return [Problem(f"model.cuda_graph_modules={modules}", f"a list of what to capture, as in [{fits}]")]
    unknown = [name for name in modules if name not in BY_NAME]
    problems = [
        Problem("model.cuda_graph_modules", f"'{name}' is none of {', '.join(BY_NAME)}", f"for this model [{fits}]")
        for name in unknown
    ]
    known = [BY_NAME[name] for name in modules if name in BY_NAME]
    reasons = ((module.name, module.problem(model)) for module in known)
    return [*problems, *(Problem("model.cuda_graph_modules", f"{name}: {why}") for name, why in reasons if why)]


def _captures_with(*kinds: str) -> Callable[[RunConfig], bool]:
    """Whether a run on GPUs has graphs of one of these kinds."""

    def captures(config: RunConfig) -> bool:
        return config.device.kind == "gpu" and _implementation(config) in kinds

    return captures


def _row(kinds: tuple[str, ...], test: Callable[[RunConfig], Any], text: str = "", solve: str = "") -> Rule[RunConfig]:
    return Rule(test, text, solve, needs=_captures_with(*kinds), head=_option)


RULES: tuple[Rule[RunConfig], ...] = (
    Rule(_replaced),
    Rule(_unknown),
    Rule(lambda t: t.device.kind != "gpu", "CUDA graphs need a GPU", "device=gpu, or cuda_graph=off",
        needs=lambda t: _implementation(t) in IMPLEMENTATIONS, head=_option),
    Rule(_warmup, needs=_captures_with(TE, FULL)),
    _row((TE,), _modules),
    _row((TE, FULL), lambda t: not t.model.get("use_te_rng_tracker") or not t.section("rng").get("te_rng_tracker"),
     "a graph cannot hold the state of other random numbers",
     "model.use_te_rng_tracker=true rng.te_rng_tracker=true"),
    _row((TE,), lambda t: t.model.get("recompute_granularity") == "full",
     "whole layers that are computed again can only be captured with the whole step",
     "model.recompute_granularity=null, or cuda_graph=full"),
    _row((TE,), lambda t: _recomputes_experts(t) and _captures(t, "moe_router"),
     "experts that are computed again cannot have a captured router",
     "leave moe out of model.recompute_modules, or moe_router and moe_preprocess out of "
     "model.cuda_graph_modules"),
    _row((TE,), lambda t: t.model.get("cpu_offloading"),
     "activations that are moved to the host cannot be captured", "model.cpu_offloading=false"),
    _row((TE,), lambda t: t.overlaps() and t.numerics.invariant, "layers that are taken apart have no graphs of their "
     "own", "cuda_graph=full or off"),
    _row((TE,), lambda t: t.overlaps() and _captures(t, "moe", "mlp"),
     "moe and mlp cannot be captured with overlapped expert communication",
     "model.overlap_moe_expert_parallel_comm=false, or other model.cuda_graph_modules"),
    _row((TE,), lambda t: _captures(t, "moe") and _captures(t, "moe_router", "moe_preprocess"),
     "moe holds moe_router and moe_preprocess already", "leave one or the others out of model.cuda_graph_modules"),
    _row((TE,), lambda t: _captures(t, "moe_preprocess") and not _captures(t, "moe_router", "moe"),
     "moe_preprocess is captured with moe_router only", "add it to model.cuda_graph_modules"),
    _row((FULL,), lambda t: t.model.get("cuda_graph_modules"),
     "the whole step is captured, so there are no modules to choose", "model.cuda_graph_modules=[]"),
    _row((FULL,), lambda t: has_experts(t.model) and not t.numerics.invariant and not padded(t.model),
     "experts get another number of tokens at every step",
     "model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true"),
    _row((FULL,), _checked("ddp.check_for_nan_in_grad"),
     "a captured step cannot wait for a check of the gradients", "ddp.check_for_nan_in_grad=false"),
    _row((FULL,), _checked("rerun_state_machine.check_for_nan_in_loss"),
     "a captured step cannot wait for a check of the loss", "rerun_state_machine.check_for_nan_in_loss=false"),
    _row((FULL,), lambda t: t.section("rerun_state_machine").get("check_for_spiky_loss"),
     "a captured step cannot wait for a check of the loss", "rerun_state_machine.check_for_spiky_loss=false"),
    _row((TE, FULL), _uneven_attention,
     "cuDNN's attention computes wrong numbers when it is replayed on 32 or 64 tokens",
     f"seq= a multiple of {TOKENS}, model.attention_backend=unfused, or cuda_graph=off"),
    _row((TE, FULL), lambda t: t.section("dist").get("distributed_backend") == "gloo",
     "Gloo sums on the host, for which no captured step waits", "dist.distributed_backend=nccl, or cuda_graph=off"),
    _row((TE,), _expandable,
     "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets NCCL write to memory that has moved",
     "set NCCL_GRAPH_REGISTER=0 too, there or as cluster.environment.NCCL_GRAPH_REGISTER=0"),
)  # fmt: skip
