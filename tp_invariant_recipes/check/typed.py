# SPDX-License-Identifier: Apache-2.0
"""Rules of what somebody types: numbers in their ranges, functions by their names, and settings that nothing reads."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.fields.catalogue import field_at
from tp_invariant_recipes.fields.field import COUNT, NOT_NEGATIVE, SEED, SIGNED, Range
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings.keys import SHORT_KEYS
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text

# Numbers in their ranges, and the largest counts of a run. The catalogue has the ranges of Bridge's fields.

Tree = dict[str, Any]

# Of our own sections.
OWN_RANGES = {
    COUNT: "cluster.ranks_per_node slurm.save_before slurm.tries slurm.rendezvous_timeout guard.every guard.products",
    SIGNED: "numerics.virtual_shards numerics.data_shards numerics.context_shards numerics.expert_groups "
    "ledger.digests",  # have rules
}
# The short keys are counts, but for these.
SHORT_RANGES = {"sp": SIGNED, "lr": NOT_NEGATIVE, "seed": SEED, "save": NOT_NEGATIVE}

BY_PATH = {path: range_ for range_, paths in OWN_RANGES.items() for path in paths.split()}
BY_PATH |= {key.path: SHORT_RANGES.get(key.name, COUNT) for key in SHORT_KEYS.values() if isinstance(key.type, type)}

# Numbers that may be infinite: a threshold that nothing reaches.
INFINITE = {"optimizer.grad_norm_skip_threshold"}

# The largest counts. Beyond them a loop or a table of Megatron's never ends. They stop slips of the keyboard, not large
# runs: each leaves far more room than any run that we know of needs.
LARGEST = 2**31 - 1  # what a 32-bit integer holds

_DEGREE = 2**16  # ranks along one dimension
SHORT = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp"), _DEGREE),
    **dict.fromkeys(("mbs", "gbs"), 2**24),
    "seq": 2**27,
    "iters": LARGEST,
    "save": LARGEST,
}
LIMITS = {SHORT_KEYS[name].path: limit for name, limit in SHORT.items()}
# The other whole numbers, by section: libraries keep sizes of a model in 32 bits, anything else in 64.
SECTIONS = {"model": LARGEST}
WIDEST = 2**63 - 1

_NAMES = {key.path: key.name for key in SHORT_KEYS.values()}


def wrong(tree: Tree) -> dict[str, Problem]:
    """Path -> problem, for every number that is none, is outside of its range, or is larger than its bound."""
    problems: dict[str, Problem] = {}
    for path, value in _numbers("", tree):
        if must := _must(path, value):
            problems.setdefault(path, Problem(f"{_NAMES.get(path, path)}={value}", f"must be {must}", rule="range"))
    return problems


def _must(path: str, value: float) -> str | None:
    """Return what the number at a path must be and is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if value > 0 and path in INFINITE else "a finite number"
    allowed = range_of(path)
    if not allowed.holds(value):
        return allowed.words
    limit = LIMITS.get(path, SECTIONS.get(path.partition(".")[0], WIDEST))
    if isinstance(value, int) and abs(value) > limit:
        return f"at most {limit}" if value > 0 else f"at least -{limit}"
    return None


def range_of(path: str) -> Range:
    """Return what the number at a path may be."""
    field = field_at(path)
    return BY_PATH.get(path) or (field.range if field else NOT_NEGATIVE)


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number of a tree and its dotted path; numbers in a list have the path of the list."""
    if type(value) in (int, float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(path, inner)


# Functions that a command line names: Bridge takes whatever can be called, and a rank would call it.


def _names(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}.{name}" for name in names.split())


# Fields -> the functions that they may name, or packages, with a dot at the end; and what to type otherwise.
KNOWN = (
    (
        _names("model", "activation_func"),
        (
            *_names("torch.nn.functional", "celu elu gelu hardswish leaky_relu mish relu relu6 selu sigmoid silu "
                    "softplus tanh"),
            *_names("megatron.core.activations", "fast_gelu quick_gelu squared_relu"),
            "megatron.core.fusions.fused_bias_geglu.quick_gelu",
        ),
        "model.activation_func=torch.nn.functional.silu, or another of torch's or megatron.core.activations",
    ),
    (
        _names("model", "init_method output_layer_init_method embedding_init_method"),
        _names("torch.nn.init", "kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_ trunc_normal_ uniform_ "
               "xavier_normal_ xavier_uniform_ zeros_"),
        "model.init_method_std=0.02, or one of torch.nn.init, such as torch.nn.init.normal_",
    ),
    (_names("model", "transformer_layer_spec hybrid_stack_spec"), ("megatron.", "tp_invariant_recipes."),
        "one of megatron.bridge, or a recipe with its own (recipe=FILE.py:FUNCTION)"),
    (
        _names("model", "finalize_model_grads_func grad_scale_func grad_sync_func no_sync_func param_sync_func "
               "moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func"),
        (),
        "leave it out: the training loop sets it",
    ),
)  # fmt: skip


def unknown(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return the functions that are none of these. typed: paths that the command line sets."""
    problems = []
    for path in dict.fromkeys(typed):
        section, _, field = path.partition(".")
        for fields, names, solve in KNOWN:
            value = config.section(section).get(field) if path in fields else None
            packages = tuple(name for name in names if name[-1] == ".")
            if value is not None and value not in names and not str(value).startswith(packages):
                problems.append(Problem(f"{path}={value_text(value)}", "no function that tpi knows", solve))
    return problems


# Settings of features that are switched off: Megatron would take each of them without a word, and nothing reads it.

_TURNED = ("rope", "yarn", "mrope")  # positions
_PROFILERS = ("use_pytorch_profiler", "use_nsys_profiler", "record_memory_history")


@dataclass(frozen=True)
class Feature:
    """fields: the beginnings of the paths of its settings. on: whether a run has it. switch: what switches it on."""

    fields: tuple[str, ...]
    on: Callable[[RunConfig], object]
    lacking: str
    switch: str


def _row(fields: str, on: Callable[[RunConfig], Any] | str, lacking: str, switch: str) -> Feature:
    """fields: separated by spaces. on: also the path of a field that a run with the feature sets."""
    return Feature(tuple(fields.split()), (lambda t: t.at(on)) if isinstance(on, str) else on, lacking, switch)


def _optimizer(config: RunConfig) -> str:
    return config.at("optimizer.optimizer") or "adam"


def _computed_again(config: RunConfig) -> bool:
    """Whether parts of layers are computed again, and the model has each that is named."""
    sizes = {"moe": "num_moe_experts", "shared_experts": "moe_shared_expert_intermediate_size"}
    named = config.model.get("recompute_modules") or ()
    has_all = all(config.model.get(size) for part, size in sizes.items() if part in named)
    return config.model.get("recompute_granularity") == "selective" and has_all


FEATURES = (
    _row("model.moe_", "model.num_moe_experts", "the model has no experts", "model.num_moe_experts=N"),
    _row("model.mtp_", "model.mtp_num_layers", "it predicts one token", "model.mtp_num_layers=N"),
    _row("model.mtp_hybrid_", lambda t: t.shape.hybrid, "it has no pattern of layers", "MODEL nemotron3_nano"),
    _row("model.linear_", lambda t: families.delta_sizes(t.model), "it has no gated delta nets",
         f"model.{families.VARIANT}={families.DELTA_NET}"),
    _row("model.mamba_", lambda t: t.shape.hybrid, "it has no Mamba layers", "MODEL nemotron3_nano"),
    _row("model.window_attn_", "model.window_size", "attention has no window", "model.window_size=[N,0]"),
    _row("model.recompute_m model.recompute_n model.distribute_saved_activations", "model.recompute_granularity",
         "nothing is computed again", "model.recompute_granularity=full"),
    _row("model.recompute_modules", _computed_again, "layers are computed again whole, or have no such part",
         "model.recompute_granularity=selective, parts that the model has"),
    _row("model.rotary_ model.rope_", lambda t: t.model.get("position_embedding_type", "rope") in _TURNED,
         "no positions are rotary", "model.position_embedding_type=rope"),
    _row("model.rope_scaling_factor", "model.rope_scaling", "rotary positions are not scaled",
         "model.rope_scaling=true"),
    _row("model.yarn_", lambda t: t.model.get("position_embedding_type") == "yarn", "no positions are YaRN's",
         "model.position_embedding_type=yarn"),
    _row("model.moe_router_bias_", "model.moe_router_enable_expert_bias", "the router has no bias of experts",
         "model.moe_router_enable_expert_bias=true"),
    _row("model.moe_router_group_topk", "model.moe_router_num_groups", "the router has no groups",
         "model.moe_router_num_groups=N"),
    _row("numerics.virtual_shards numerics.grad_norm numerics.clip_rounding", lambda t: t.numerics.invariant,
         "Megatron's numerics have sums of their own", "numerics=tree"),
    _row("data.tokenizer data.json_key data.cache", lambda t: t.data.kind == "text", "no text is prepared",
         "data=text data.path=PATH"),
    _row("validation.eval_global_batch_size validation.eval_micro_batch_size validation.start_eval_at_iter",
         "validation.eval_iters", "nothing is validated", "validation.eval_iters=N"),
    _row("ledger.state_digests", "ledger.digests", "nothing has digests", "ledger.digests=1"),
    _row("ledger.experts", "model.num_moe_experts", "the model has no experts", "model.num_moe_experts=N"),
    _row("profiling.profile_ profiling.nvtx_ profiling.record_shapes profiling.memory_snapshot_",
         lambda t: any(map(t.section("profiling").get, _PROFILERS)), "nothing is profiled",
         "profiling.use_pytorch_profiler=true"),
    _row("scheduler.lr_wsd_", lambda t: t.at("scheduler.lr_decay_style") == "WSD",
         "the learning rate has another decay", "scheduler.lr_decay_style=WSD"),
    _row("optimizer.adam_", lambda t: _optimizer(t) != "sgd", "SGD has none", "optimizer.optimizer=adam"),
    _row("optimizer.sgd_", lambda t: _optimizer(t) == "sgd", "Adam has none", "optimizer.optimizer=sgd"),
    _row("optimizer.muon_", lambda t: "muon" in _optimizer(t) or t.numerics.invariant, "Muon is off",
         "optimizer.optimizer=muon"),
    _row("checkpoint.async_ checkpoint.use_persistent_ckpt_worker", "checkpoint.async_save",
         "nothing is saved asynchronously", "checkpoint.async_save=true"),
)  # fmt: skip


def idle(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return the settings that nothing reads; null, false and 0 are none. typed: paths that the command line sets."""
    problems = []
    for path in dict.fromkeys(typed):
        feature = next((f for f in FEATURES if path.startswith(f.fields) and not f.on(config)), None)
        if feature and (value := config.at(path)):
            solve = f"{feature.switch}, or leave it out"
            problems.append(Problem(f"{path}={value_text(value)}", f"{feature.lacking}, so nothing reads it", solve))
    return problems
