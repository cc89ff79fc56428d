"""Requirements of CUDA graphs on the configuration: one row per rule, and one row per module that can be captured.

The rules are those of Megatron-Core 0.19.2 (`TransformerConfig.__post_init__`, `TECudaGraphHelper`) and Megatron-Bridge
0.6.2 (`validate_cuda_graph_configuration`), which report one failed assertion at a time, some only on the GPU.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.settings.run_config import RunConfig

Model = Mapping[str, Any]

TE, FULL = "transformer_engine", "full_iteration"
IMPLEMENTATIONS = {TE: "te", FULL: "full"}


def requested(model: Model) -> bool:
    """Whether a model's configuration has CUDA graphs of any kind."""
    return model.get("cuda_graph_impl") not in (None, "none")


# --- Modules ---


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
    """The modules that `cuda_graph=te` captures of a model by default. invariant: whether numerics are."""
    fit = (module for module in MODULES if module.problem(model) is None and module.default(model))
    return [module.name for module in fit if module.invariant or not invariant]


def padded(model: Model) -> bool:
    """Whether every expert gets the same number of tokens at every step, so that its products can be replayed."""
    return model.get("moe_expert_capacity_factor") is not None and bool(model.get("moe_pad_expert_input_to_capacity"))


def _layers(model: Model, kind: str) -> bool:
    pattern = model.get("hybrid_layer_pattern")
    return pattern is not None and kind in pattern.partition("/")[0]


def _experts(model: Model) -> bool:
    return (model.get("num_moe_experts") or 0) > 1


def _attention(model: Model) -> str | None:
    hybrid = model.get("hybrid_layer_pattern") is not None
    return "this model has no attention layers" if hybrid and not _layers(model, "*") else None


def _mlp(model: Model) -> str | None:
    frequency = model.get("moe_layer_freq", 1)
    if _experts(model) and (frequency == 1 or (isinstance(frequency, list) and 0 not in frequency)):
        return "for dense layers, of which this model has none"
    hybrid = model.get("hybrid_layer_pattern") is not None
    return "for dense layers, of which this model has none" if hybrid and not _layers(model, "-") else None


def _mamba(model: Model) -> str | None:
    return None if _layers(model, "M") else "this model has no Mamba layers"


def _moe(model: Model) -> str | None:
    if not _experts(model):
        return "this model has no experts"
    if padded(model):
        return None
    return (
        "experts get another number of tokens at every step; pad them: model.moe_expert_capacity_factor=1.0 "
        "model.moe_pad_expert_input_to_capacity=true, or capture moe_router and moe_preprocess"
    )


def _router(model: Model) -> str | None:
    return None if _experts(model) else "this model has no experts"


def _preprocess(model: Model) -> str | None:
    if not _experts(model):
        return "this model has no experts"
    waits = model.get("moe_expert_capacity_factor") is not None or model.get("moe_router_padding_for_fp8")
    if padded(model) or model.get("moe_token_dispatcher_type") != "alltoall" or not waits:
        return None
    return (
        "waits for numbers from the GPU; model.moe_expert_capacity_factor=null and "
        "model.moe_router_padding_for_fp8=false, or leave moe_preprocess out"
    )


MODULES = (
    Module("attn", _attention),
    Module("mamba", _mamba),
    Module("mlp", _mlp),
    Module("moe", _moe, invariant=False),
    Module("moe_router", _router, default=lambda model: not padded(model)),
    Module("moe_preprocess", _preprocess, default=lambda model: not padded(model), invariant=False),
)
_BY_NAME = {module.name: module for module in MODULES}
NOT_INVARIANT = tuple(module.name for module in MODULES if not module.invariant)


# --- Rules ---


def _model(field: str) -> Callable[[RunConfig], Any]:
    return lambda config: config.model.get(field)


def _checked(section: str, field: str) -> Callable[[RunConfig], bool]:
    """Whether a check is on; it is on by default."""
    return lambda config: config.section(section).get(field, True) is not False


def _captures(config: RunConfig, *names: str) -> bool:
    modules = config.model.get("cuda_graph_modules")
    return isinstance(modules, list) and any(name in modules for name in names)


def _recomputes(config: RunConfig, module: str) -> bool:
    model = config.model
    return model.get("recompute_granularity") == "selective" and module in (model.get("recompute_modules") or ())


def _uneven_attention(config: RunConfig) -> bool:
    """Whether cuDNN's attention is captured on such a number of tokens. `portable` has an attention of its own."""
    model, arithmetic = config.model, config.numerics.arithmetic
    if model["seq_length"] % TOKENS == 0 or (arithmetic is not None and arithmetic.any_machine):
        return False
    captured = model.get("cuda_graph_impl") == FULL or _captures(config, "attn")
    return captured and _attention(model) is None and model.get("attention_backend") not in ("unfused", "local")


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

BOTH = "both"
# Implementation, whether the configuration breaks the rule, and the problem with the key to change.
RULES: tuple[tuple[str, Callable[[RunConfig], Any], str], ...] = (
    (BOTH, lambda t: not t.model.get("use_te_rng_tracker") or not t.section("rng").get("te_rng_tracker"),
     "a graph cannot hold the state of other random numbers; model.use_te_rng_tracker=true rng.te_rng_tracker=true"),
    (TE, lambda t: t.model.get("recompute_granularity") == "full",
     "whole layers that are computed again can only be captured with the whole step; "
     "model.recompute_granularity=null, or cuda_graph=full"),
    (TE, lambda t: _recomputes(t, "moe") and _captures(t, "moe_router"),
     "experts that are computed again cannot have a captured router; leave moe out of model.recompute_modules, or "
     "moe_router and moe_preprocess out of model.cuda_graph_modules"),
    (TE, _model("cpu_offloading"),
     "activations that are moved to the host cannot be captured; model.cpu_offloading=false"),
    (TE, lambda t: t.model.get("overlap_moe_expert_parallel_comm") and _captures(t, "moe", "mlp"),
     "moe and mlp cannot be captured with overlapped expert communication; "
     "model.overlap_moe_expert_parallel_comm=false, or other model.cuda_graph_modules"),
    (TE, lambda t: _captures(t, "moe") and _captures(t, "moe_router", "moe_preprocess"),
     "moe holds moe_router and moe_preprocess already; leave one or the others out of model.cuda_graph_modules"),
    (TE, lambda t: _captures(t, "moe_preprocess") and not _captures(t, "moe_router", "moe"),
     "moe_preprocess is captured with moe_router only; add it to model.cuda_graph_modules"),
    (FULL, lambda t: t.model.get("cuda_graph_modules"),
     "the whole step is captured, so there are no modules to choose; model.cuda_graph_modules=[]"),
    (FULL, lambda t: _experts(t.model) and not padded(t.model),
     "experts get another number of tokens at every step; model.moe_expert_capacity_factor=1.0 "
     "model.moe_pad_expert_input_to_capacity=true"),
    (FULL, _checked("ddp", "check_for_nan_in_grad"),
     "a captured step cannot wait for a check of the gradients; ddp.check_for_nan_in_grad=false"),
    (FULL, _checked("rerun_state_machine", "check_for_nan_in_loss"),
     "a captured step cannot wait for a check of the loss; rerun_state_machine.check_for_nan_in_loss=false"),
    (FULL, lambda t: t.section("rerun_state_machine").get("check_for_spiky_loss"),
     "a captured step cannot wait for a check of the loss; rerun_state_machine.check_for_spiky_loss=false"),
    (BOTH, _uneven_attention,
     "cuDNN's attention computes wrong numbers when it is replayed on 32 or 64 tokens; "
     f"seq= a multiple of {TOKENS}, model.attention_backend=unfused, or cuda_graph=off"),
    (BOTH, lambda t: t.section("dist").get("distributed_backend") == "gloo",
     "Gloo sums on the host, for which no captured step waits; dist.distributed_backend=nccl, or cuda_graph=off"),
    (TE, _expandable,
     "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets NCCL write to memory that has moved; "
     "set NCCL_GRAPH_REGISTER=0 too, there or as cluster.environment.NCCL_GRAPH_REGISTER=0"),
)  # fmt: skip


def problems(config: RunConfig) -> list[str]:
    """All reasons why the run's CUDA graphs cannot be captured; empty without CUDA graphs."""
    model = config.model
    replaced = [f"model.{f}={model[f]}: cuda_graph=te or cuda_graph=full instead" for f in REPLACED if model.get(f)]
    implementation = model.get("cuda_graph_impl") or "none"
    if implementation == "none":
        return replaced
    if implementation not in IMPLEMENTATIONS:
        return [*replaced, f"model.cuda_graph_impl={implementation}: cuda_graph=off, cuda_graph=te or cuda_graph=full"]
    requested = f"cuda_graph={IMPLEMENTATIONS[implementation]}"
    if config.device.kind != "gpu":
        return [*replaced, f"{requested}: CUDA graphs need a GPU; device=gpu, or cuda_graph=off"]
    warmup = model.get("cuda_graph_warmup_steps", 3)
    # Without a preceding step, Transformer Engine captures layers before their lazy state exists.
    whole = type(warmup) is int and warmup >= 1
    steps = [] if whole else [f"model.cuda_graph_warmup_steps={warmup}: must be a number of steps, at least 1"]
    modules = _modules(model, config.numerics.invariant) if implementation == TE else []
    rules = [why for of, wrong, why in RULES if of in (implementation, BOTH) and wrong(config)]
    return [*replaced, *steps, *(f"{requested}: {problem}" for problem in (*modules, *rules))]


def _modules(model: Model, invariant: bool) -> list[str]:
    """The problems of the modules to capture."""
    modules = model.get("cuda_graph_modules")
    fits = ",".join(graphed_modules(model, invariant))
    if not isinstance(modules, list) or not modules:
        return [f"model.cuda_graph_modules={modules}: a list of what to capture, as in [{fits}]"]
    unknown = [name for name in modules if name not in _BY_NAME]
    found = [
        f"model.cuda_graph_modules: '{name}' is none of {', '.join(_BY_NAME)}; for this model [{fits}]"
        for name in unknown
    ]
    known = [_BY_NAME[name] for name in modules if name in _BY_NAME]
    reasons = ((module.name, module.problem(model)) for module in known)
    return [*found, *(f"model.cuda_graph_modules: {name}: {why}" for name, why in reasons if why)]
