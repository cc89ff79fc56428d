# SPDX-License-Identifier: Apache-2.0
"""What single modes and CUDA graphs cover."""

import os
from functools import partial

from tp_invariant_recipes.check import recording
from tp_invariant_recipes.check.invariant.model import is_mla
from tp_invariant_recipes.check.rule import Rule, Test, has, limit_of, name_of, uncaptured
from tp_invariant_recipes.settings import low_precision
from tp_invariant_recipes.settings.cuda_graphs import FULL, IMPLEMENTATIONS, NOT_INVARIANT, TE
from tp_invariant_recipes.settings.delta_net import has_it
from tp_invariant_recipes.settings.run_config import RunConfig

# The limits of numerics=portable: what is not specified to the last bit, beyond what no invariant mode covers.

SCHEDULES = ("constant", "linear", "cosine")
ATTENTION_BACKENDS = ("auto", "local")


def _is_portable(config: RunConfig) -> bool:
    return config.numerics.arithmetic is not None and config.numerics.arithmetic.any_machine


_portable_row = partial(limit_of, _is_portable)
_own = partial(limit_of, lambda t: _is_portable(t) and (is_mla(t) or has_it(t.model)))
_experts = partial(limit_of, lambda t: _is_portable(t) and t.shape.experts)

# Fields of experts that name another operation than those stated: of any router, and of one with softmax scores.
ABSENT = ("moe_expert_capacity_factor", "moe_z_loss_coeff", "moe_latent_size")
OF_SIGMOID = (
    *("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_num_groups"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
)
SCORES = ("softmax", "sigmoid")


def _scores(config: RunConfig) -> str:
    return config.model.get("moe_router_score_function") or SCORES[0]


def _concentrated(config: RunConfig) -> bool:
    """Whether YaRN of latent attention multiplies cosines; all defaults are Megatron-Core's."""
    model = config.model
    scaled = model.get("rope_type", "yarn") == "yarn" and model.get("rotary_scaling_factor", 40) > 1
    return is_mla(config) and scaled and model.get("mscale", 1.0) != model.get("mscale_all_dim", 0.0)


EXPERTS = (
    _experts(lambda t: _scores(t) not in SCORES, "other scores of a router have no portable version",
        f"model.moe_router_score_function one of {', '.join(SCORES)}"),
    *(
        _portable_row(has(field), f"experts with model.{field} have no portable version", "leave it unset")
        for field in ABSENT
    ),
    *(
        limit_of(lambda t: _is_portable(t) and _scores(t) == SCORES[0], has(field),
            f"softmax scores with model.{field} have no portable version", "leave it unset")
        for field in OF_SIGMOID
    ),
)  # fmt: skip

PORTABLE_LIMITS = (
    _portable_row(lambda t: t.model.get("transformer_impl") not in (None, "local"),
        "Transformer Engine's layers have a library's arithmetic", "model.transformer_impl=local"),
    _portable_row(lambda t: t.mixed_precision != "bf16_mixed" and not low_precision.enabled(t),
        "attention and GEMMs are specified for bf16 and FP8 only", "precision=bf16"),
    _portable_row(lambda t: t.shape.hybrid, "Mamba layers have no portable version", "numerics=tree"),
    *EXPERTS,
    _own(_concentrated, "YaRN that multiplies cosines has no portable version",
        "model.mscale_all_dim with the value of model.mscale"),
    _own(low_precision.enabled, "multi-latent attention and gated delta nets have no portable version in FP8",
        "precision=bf16"),
    _own(*uncaptured("portable multi-latent attention and gated delta nets have")),
    _portable_row(lambda t: t.model.get("softmax_type", "vanilla") != "vanilla",
        "attention sinks have no portable version", "model.softmax_type=vanilla"),
    *(
        _portable_row(has(field), f"activations with model.{field} have no portable version", "leave it unset")
        for field in ("activation_func_clamp_value", "glu_linear_offset")
    ),
    _portable_row(has("window_size"), "sliding-window attention has no portable version",
        "leave model.window_size unset"),
    _portable_row(lambda t: t.model.get("position_embedding_type") == "yarn", "YaRN has no portable version",
        "model.position_embedding_type=rope"),
    _portable_row(lambda t: name_of(t.model.get("activation_func")) != "silu" or not t.shape.gated,
        "of activations only SwiGLU has a portable version",
        "model.activation_func=torch.nn.functional.silu, model.gated_linear_unit=true"),
    _portable_row(has("add_bias_linear"), "biases of projections have no portable version",
        "model.add_bias_linear=false (model.add_qkv_bias may be true)"),
    _portable_row(
        lambda t: t.model.get("position_embedding_type", "rope") != "rope" or t.model.get("rotary_interleaved"),
        "of positions only rotary ones in halves have a portable version",
        "model.position_embedding_type=rope, model.rotary_interleaved=false"),
    _portable_row(lambda t: name_of(t.model.get("attention_backend") or "auto") not in ATTENTION_BACKENDS,
        "it has an attention of its own", "model.attention_backend=auto"),
    _portable_row(lambda t: t.section("optimizer").get("optimizer", "adam") != "adam",
        "of optimizers only Adam has a portable version", "optimizer.optimizer=adam"),
    _portable_row(lambda t: t.section("optimizer").get("use_precision_aware_optimizer"), "Adam's moments are fp32",
        "optimizer.use_precision_aware_optimizer=false"),
    _portable_row(lambda t: t.section("scheduler").get("lr_decay_style", "linear") not in SCHEDULES,
        "other schedules take a library's power", f"scheduler.lr_decay_style one of {', '.join(SCHEDULES)}"),
)  # fmt: skip


# The limits of the invariant numerics with CUDA graphs, beyond those of Megatron-Bridge (settings/cuda_graphs.py).

CHECK = "TPI_CHECK_PRODUCTS"


def _captured_with(config: RunConfig) -> frozenset[str]:
    """Options of cuda_graph= that the layers of a run's mode were captured with."""
    return config.numerics.arithmetic.graphs if config.numerics.arithmetic else frozenset()


def _graph_row(kinds: tuple[str, ...], wrong: Test, text: str, solve: str = "") -> Rule[RunConfig]:
    """kinds: of graphs that the row is about."""
    return limit_of(lambda t: t.model.get("cuda_graph_impl") in kinds, wrong, text, solve)


def _captured_experts(config: RunConfig) -> bool:
    return config.shape.experts > 1 and _captured_with(config) == {IMPLEMENTATIONS[FULL]}


def _sampled_experts(config: RunConfig) -> bool:
    return config.shape.experts > 1 and config.guard.kind == recording.PRODUCTS


def _waiting_experts(config: RunConfig) -> bool:
    return config.shape.experts > 1 and (low_precision.enabled(config) or bool(config.shape.biased))


GRAPH_LIMITS = (
    _graph_row((FULL, TE), lambda t: not _captured_with(t), "its layers have not been captured",
        "cuda_graph=off, or numerics=tree"),
    _graph_row((TE,), lambda t: _captured_with(t) == {IMPLEMENTATIONS[FULL]},
        "its layers have been captured with the whole step only", "cuda_graph=full, or off"),
    _graph_row((TE,), lambda t: (t.numerics.context_shards or 1) > 1,
        "a captured layer gets a mask, which attention with context shards does not take", "cuda_graph=full, or off"),
    _graph_row((TE,), lambda t: {*NOT_INVARIANT} & {*(t.model.get("cuda_graph_modules") or ())},
        f"{' and '.join(NOT_INVARIANT)} have been captured with the whole step only",
        "leave them out of model.cuda_graph_modules, or cuda_graph=full"),
    _graph_row((FULL,), lambda t: t.layout.pp > 1, "stages wait for each other where a captured step cannot",
        "pp=1, or with numerics=tree cuda_graph=te"),
    _graph_row((FULL,), _captured_experts, "experts have not been captured", "cuda_graph=off, or numerics=tree"),
    _graph_row((FULL,), _sampled_experts, "guard=products samples no GEMM of experts in a graph of the whole step",
        "cuda_graph=te, or guard=off"),
    _graph_row((FULL,), _waiting_experts,
        "experts in FP8 or with biases wait for numbers of tokens from the GPU where a captured step cannot",
        "cuda_graph=te, or off"),
    _graph_row((FULL, TE), lambda t: (t.cluster.environment | dict(os.environ)).get(CHECK) == "1",
        f"{CHECK}=1 compares GEMMs where a captured step cannot wait", "cuda_graph=off, or leave it unset"),
)  # fmt: skip
