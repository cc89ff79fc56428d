"""Settings of features that are switched off: Megatron would take each of them without a word, and nothing reads it.

A recipe may carry them. What somebody types is meant to change the run, so it is refused.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

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


def _optimizer(config: RunConfig) -> str:
    return config.at("optimizer.optimizer") or "adam"


FEATURES = (
    Feature(("model.moe_",), lambda t: t.shape.experts, "the model has no experts", "model.num_moe_experts=N"),
    Feature(("model.mtp_",), lambda t: t.shape.depths, "it predicts one token", "model.mtp_num_layers=N"),
    Feature(("model.mtp_hybrid_",), lambda t: t.shape.hybrid, "it has no pattern of layers", "MODEL nemotron3_nano"),
    Feature(
        ("model.linear_",),
        lambda t: families.delta_sizes(t.model),
        "it has no gated delta nets",
        f"model.{families.VARIANT}={families.DELTA_NET}",
    ),
    Feature(("model.mamba_",), lambda t: t.shape.hybrid, "it has no Mamba layers", "MODEL nemotron3_nano"),
    Feature(
        ("model.window_attn_",),
        lambda t: t.model.get("window_size"),
        "attention has no window",
        "model.window_size=[N,0]",
    ),
    Feature(
        ("model.recompute_m", "model.recompute_n", "model.distribute_saved_activations"),
        lambda t: t.model.get("recompute_granularity"),
        "nothing is computed again",
        "model.recompute_granularity=full",
    ),
    Feature(
        ("model.rotary_", "model.rope_"),
        lambda t: t.model.get("position_embedding_type", "rope") in _TURNED,
        "no positions are rotary",
        "model.position_embedding_type=rope",
    ),
    Feature(
        ("model.rope_scaling_factor",),
        lambda t: t.model.get("rope_scaling"),
        "rotary positions are not scaled",
        "model.rope_scaling=true",
    ),
    Feature(
        ("model.yarn_",),
        lambda t: t.model.get("position_embedding_type") == "yarn",
        "no positions are YaRN's",
        "model.position_embedding_type=yarn",
    ),
    Feature(
        ("model.moe_router_bias_",),
        lambda t: t.model.get("moe_router_enable_expert_bias"),
        "the router has no bias of experts",
        "model.moe_router_enable_expert_bias=true",
    ),
    Feature(
        ("model.moe_router_group_topk",),
        lambda t: t.model.get("moe_router_num_groups"),
        "the router has no groups",
        "model.moe_router_num_groups=N",
    ),
    Feature(
        ("numerics.virtual_shards", "numerics.grad_norm", "numerics.clip_rounding"),
        lambda t: t.numerics.invariant,
        "stock numerics have sums of their own",
        "numerics=tree",
    ),
    Feature(
        ("data.tokenizer", "data.json_key", "data.cache"),
        lambda t: t.data.kind == "text",
        "no text is prepared",
        "data=text data.path=PATH",
    ),
    Feature(
        ("validation.eval_global_batch_size", "validation.eval_micro_batch_size", "validation.start_eval_at_iter"),
        lambda t: t.at("validation.eval_iters"),
        "nothing is validated",
        "validation.eval_iters=N",
    ),
    Feature(("ledger.state_digests",), lambda t: t.ledger.digests, "nothing has digests", "ledger.digests=1"),
    Feature(("ledger.experts",), lambda t: t.shape.experts, "the model has no experts", "model.num_moe_experts=N"),
    Feature(
        ("profiling.profile_", "profiling.nvtx_", "profiling.record_shapes", "profiling.memory_snapshot_"),
        lambda t: any(map(t.section("profiling").get, _PROFILERS)),
        "nothing is profiled",
        "profiling.use_pytorch_profiler=true",
    ),
    Feature(
        ("scheduler.lr_wsd_",),
        lambda t: t.section("scheduler").get("lr_decay_style") == "WSD",
        "the learning rate has another decay",
        "scheduler.lr_decay_style=WSD",
    ),
    Feature(("optimizer.adam_",), lambda t: _optimizer(t) != "sgd", "SGD has none", "optimizer.optimizer=adam"),
    Feature(("optimizer.sgd_",), lambda t: _optimizer(t) == "sgd", "Adam has none", "optimizer.optimizer=sgd"),
    Feature(
        ("optimizer.muon_",),
        lambda t: "muon" in _optimizer(t) or t.numerics.invariant,
        "Muon is off",
        "optimizer.optimizer=muon",
    ),
    Feature(
        ("checkpoint.async_", "checkpoint.use_persistent_ckpt_worker"),
        lambda t: t.section("checkpoint").get("async_save"),
        "nothing is saved asynchronously",
        "checkpoint.async_save=true",
    ),
)


def idle(config: RunConfig, typed: Collection[str]) -> list[Problem]:
    """Return the settings that nothing reads; null, false and 0 are none. typed: paths that the command line sets."""
    problems = []
    for path in dict.fromkeys(typed):
        feature = next((f for f in FEATURES if path.startswith(f.fields) and not f.on(config)), None)
        if feature and (value := config.at(path)):
            solve = f"{feature.switch}, or leave it out"
            problems.append(Problem(f"{path}={value_text(value)}", f"{feature.lacking}, so nothing reads it", solve))
    return problems
