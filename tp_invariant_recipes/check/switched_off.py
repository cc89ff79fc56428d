"""Settings of features that are switched off: Megatron would take each of them without a word, and nothing reads it.

A recipe may carry them. What somebody types is meant to change the run, so it is refused.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import Problem
from tp_invariant_recipes.numerics.megatron import families
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.settings.values import value_text

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
         "stock numerics have sums of their own", "numerics=tree"),
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
