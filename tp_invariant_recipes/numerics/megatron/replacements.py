# SPDX-License-Identifier: Apache-2.0
"""What the invariant modes replace of Megatron and Bridge: one row a class or function that has no seam.

A row that names settings is the path from the configuration to the code: search for `data_shards` or `grad_norm`.
Layers of a model's specification are no rows; numerics/megatron/spec.py has them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.settings import NumericsSettings
from tp_invariant_recipes.replacement import Replacement, instead, wrapped


@dataclass(frozen=True)
class ReplacementRow:
    """One class or function of an installed package, and what stands in its place.

    target:   "package.module:attribute.path".
    path:     MODULE:NAME below this package.
    why:      what would depend on the layout without it.
    wraps:    whether `path` is called with the original and the settings, and returns what stands in its place.
    settings: fields of `numerics` that it is called with after the original.
    when:     whether a run needs it.
    """

    target: str
    path: str
    why: str
    wraps: bool = True
    settings: tuple[str, ...] = ()
    when: Callable[[NumericsSettings], bool] = lambda numerics: True

    def replacement(self, numerics: NumericsSettings) -> Replacement:
        """Return the row with a run's settings."""
        if not self.wraps:
            return instead(self.target, self.path, self.why)
        return wrapped(self.target, self.path, self.why, *(getattr(numerics, name) for name in self.settings))


def _exact_norm(numerics: NumericsSettings) -> bool:
    return numerics.grad_norm == "exact"


def _bridges_loop(numerics: NumericsSettings) -> bool:
    return numerics.data_shards is not None


def _cuts_sequences(numerics: NumericsSettings) -> bool:
    return (numerics.context_shards or 1) > 1


_BY_NAME = "GPTModel builds its embedding and output layer by name"
_NORM = "a sum of squares depends on how parameters are sharded"
_ONE_LAUNCH = "clipping, AdamW and rounding would read and write the same memory one after the other"
_SHARD_ENDS = "a data shard ends with a backward pass"
_ROUTER = "router statistics are sums too"
_DEPTHS = "so are the losses of MTP"
_COMPILES = "each rank would import torch's compiler, with the same bits"

ROWS = (
    # --- Layers that Megatron builds by name ---
    ReplacementRow("megatron.core.tensor_parallel:ColumnParallelLinear",
        "numerics.megatron.local:InvariantColumnParallelLinear", _BY_NAME, wraps=False),
    ReplacementRow("megatron.core.tensor_parallel:VocabParallelEmbedding",
        "numerics.megatron.local:InvariantVocabParallelEmbedding", _BY_NAME, wraps=False),
    ReplacementRow("megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.__init__",
        "numerics.megatron.local:with_positions",
        "torch adds up in bf16 what several sequences of a row give to a position"),
    ReplacementRow("megatron.core.tensor_parallel:vocab_parallel_cross_entropy",
        "numerics.megatron.local:cross_entropy_of_mode", "sum(exp) over the vocabulary crosses ranks",
        settings=("virtual_shards", "mode")),
    ReplacementRow("megatron.core.models.hybrid.hybrid_block:TENorm", "numerics.megatron.spec:final_norm",
        "HybridStack builds its final norm by name"),
    ReplacementRow("megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
        "numerics.megatron.base:layers_of_stack",
        "a specification has one class for all layers of a kind, and some of these are in FP8"),
    ReplacementRow("megatron.core.transformer.moe.moe_layer:TELinear",
        "numerics.megatron.router:latent_projection",
        "MoELayer builds the projections to experts' latents by name"),
    ReplacementRow("megatron.core.models.gpt.moe_module_specs:SharedExpertMLP",
        "numerics.megatron.router:InvariantSharedExpertMLP",
        "a specification builds shared experts by name, and the gradient of their gate is a sum over tokens",
        wraps=False),
    ReplacementRow("megatron.bridge.models.gpt_provider:mtp_block_spec",
        "numerics.megatron.mtp:invariant_block",
        "Bridge builds the layers of MTP by name"),
    # --- The norm of the gradient, and clipping ---
    *(
        ReplacementRow(f"megatron.core.optimizer.{module}:get_grad_norm_fp32", path, _NORM, wraps=False, when=when)
        for module in ("optimizer", "layer_wise_optimizer")
        for path, when in (
            ("numerics.sums.grad_norm:get_grad_norm_fp32", _exact_norm),
            ("numerics.sums.grad_norm:fp64_grad_norm", lambda numerics: not _exact_norm(numerics)),
        )
    ),
    ReplacementRow("megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
        "numerics.sums.grad_norm:chained_grad_norm",
        "Megatron rounds the norms of experts and of all else before it adds them", wraps=False, when=_exact_norm),
    ReplacementRow("megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        "numerics.sums.grad_norm:reading_late",
        "the exact norm is a number, and the GPU would wait for it while the host collects the gradients to clip"),
    ReplacementRow("megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
        "numerics.megatron.optimizer_step:clipping_with_the_step", _ONE_LAUNCH,
        when=lambda numerics: numerics.clip_rounding != "pow2"),
    ReplacementRow("megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
        "numerics.megatron.optimizer_step:in_one_launch", _ONE_LAUNCH),
    # --- An optimizer of matrices ---
    ReplacementRow("megatron.core.optimizer:_create_emerging_optimizer", "numerics.megatron.muon:whole_matrices",
        "Newton-Schulz steps add over whole rows, in the order in which ranks have them"),
    # --- Gradients over data-parallel and context-parallel ranks ---
    ReplacementRow("megatron.core.distributed:DistributedDataParallel.__init__",
        "numerics.megatron.data_parallel:prepared", "a rank may have several data shards and context shards",
        settings=("data_shards", "context_shards")),
    ReplacementRow("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.compute_full_param_layout",
        "numerics.megatron.data_parallel:tied_weights_alone",
        "a tied weight's gradient, reduced with the first layer's, would be under no backward pass"),
    ReplacementRow("megatron.core.distributed:DistributedDataParallel._make_backward_post_hook",
        "numerics.megatron.data_parallel:recording_model", _SHARD_ENDS),
    *(
        ReplacementRow(f"megatron.core.pipeline_parallel.{step}",
            "numerics.megatron.data_parallel:ending_a_micro_batch", _SHARD_ENDS)
        for step in ("schedules:backward_step", "combined_1f1b:combined_forward_backward_step")
    ),
    ReplacementRow("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        "numerics.megatron.data_parallel:tree_over_ranks", "collectives add in an order of their own"),
    ReplacementRow("megatron.core.distributed:DistributedDataParallel.finish_grad_sync",
        "numerics.megatron.data_parallel:restarting",
        "a tied weight's lookups are summed apart from the output layer's gradient, in one order for every pp"),
    ReplacementRow("megatron.core.distributed:DistributedDataParallel.zero_grad_buffer",
        "numerics.megatron.data_parallel:zeroing_contexts", "gradients lie in more buffers"),
    ReplacementRow("megatron.core.distributed:DistributedDataParallel._make_forward_pre_hook",
        "numerics.megatron.data_parallel:reading_below",
        "layers read weights of modules that never run, which may still be on their way"),
    # --- The same of Megatron-FSDP ---
    *(
        ReplacementRow(f"megatron.core.distributed.fsdp.src.megatron_fsdp.{target}", f"numerics.megatron.fsdp:{name}",
            why, settings=settings, when=_bridges_loop)
        for target, name, why, settings in (
            ("megatron_fsdp:MegatronFSDP.__init__", "prepared",
             "a rank may have several data shards", ("data_shards",)),
            ("param_and_grad_buffer:GradReducePipeline._bucket_group_gradient_reduce", "reduced_when_ready",
             "collectives add in an order of their own, and micro-batches are added up as they come", ()),
            ("param_and_grad_buffer:ParamAndGradBuffer.reduce_scatter_gradients", "reduced_at_once",
             "collectives add in an order of their own", ()),
            ("megatron_fsdp:MegatronFSDP.attach_grad_to_optimizer_state", "finishing",
             "the sums of the passes are added last", ()),
            ("param_and_grad_buffer:ParamAndGradBuffer.zero_grad", "zeroing", "gradients lie in more buffers", ()),
        )
    ),
    # --- Data, losses and statistics, where the loop is Bridge's ---
    ReplacementRow("megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        "numerics.megatron.data_parallel:divided_by_all_ranks", "dp changes no rounding", when=_bridges_loop),
    ReplacementRow("megatron.bridge.training.train:get_forward_backward_func",
        "numerics.megatron.data_order:in_turns", "experts add the data shards of a group in turns",
        when=lambda numerics: numerics.expert_groups is not None),
    *(
        ReplacementRow(
            f"megatron.bridge.training.{module}:get_forward_backward_func",
            "numerics.sums.step_values:losses_summed",
            "the loss is a sum over micro-batches and ranks",
            settings=("data_shards", "context_shards"),
            when=_bridges_loop,
        )
        for module in ("train", "eval")
    ),
    ReplacementRow("megatron.bridge.training.train:FullCudaGraphWrapper", "numerics.megatron.graph_room:with_room",
        "a graph of a step would have slots for any choice of experts"),
    ReplacementRow("megatron.bridge.data.loaders:build_pretraining_data_loader",
        "numerics.megatron.data_order:consecutive", "which sequences a shard has must not depend on dp",
        settings=("data_shards",), when=_bridges_loop),
    ReplacementRow("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.record",
        "numerics.sums.step_values:separate_metrics", _ROUTER, when=_bridges_loop),
    ReplacementRow("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
        "numerics.sums.step_values:metrics_summed", _ROUTER, settings=("data_shards",), when=_bridges_loop),
    ReplacementRow("megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
        "numerics.megatron.mtp:separate_losses", _DEPTHS, when=_bridges_loop),
    ReplacementRow("megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.reduce_metrics_in_tracker",
        "numerics.megatron.mtp:losses_summed", _DEPTHS, settings=("data_shards",), when=_bridges_loop),
    # --- Sequences that share a row ---
    *(
        ReplacementRow(
            f"megatron.core.models.{model}.forward",
            "numerics.megatron.attention.packed:looped",
            "weight gradients would be GEMMs over all sequences of a packed row",
        )
        for model in ("gpt.gpt_model:GPTModel", "hybrid.hybrid_model:HybridModel")
    ),
    ReplacementRow("megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.register_grad_ready",
        "numerics.megatron.attention.packed:ready_at_the_end",
        "rows have different numbers of sequences, and so of backward passes of layers that are computed again"),
    ReplacementRow("megatron.bridge.training.gpt_step:masked_next_token_loss",
        "numerics.megatron.attention.packed:loss_of_each", "so would the logged loss", when=_bridges_loop),
    # --- The part of a sequence that a rank has ---
    ReplacementRow("megatron.bridge.training.gpt_step:get_batch_on_this_cp_rank",
        "numerics.megatron.attention.core_attention:rank_batch",
        "tokens lie context shard by context shard, on one rank too", settings=("context_shards",),
        when=_cuts_sequences),
    ReplacementRow("megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
        "numerics.megatron.attention.core_attention:rank_rotary", "so do their positions",
        settings=("context_shards",), when=_cuts_sequences),
    ReplacementRow("megatron.bridge.training.gpt_step:masked_next_token_loss",
        "numerics.megatron.attention.core_attention:rank_loss",
        "a rank's tokens would count by their number on that rank", settings=("context_shards",),
        when=_cuts_sequences),
    # --- Functions that torch would compile at every start ---
    ReplacementRow("megatron.bridge.training.setup:set_jit_fusion_options", "numerics.megatron.local:compile_nothing",
        _COMPILES, wraps=False, when=_bridges_loop),
    *(
        ReplacementRow(f"megatron.core.fusions.{target}", f"numerics.megatron.local:{name}", _COMPILES)
        for target, name in (
            ("fused_bias_dropout:bias_dropout_add_fused_train", "residual_add"),
            ("fused_bias_swiglu:swiglu", "swiglu"),
            ("fused_bias_swiglu:swiglu_back", "swiglu_back"),
        )
    ),
    # --- What takes a CPU's host longer than its numbers ---
    ReplacementRow("megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_bshd",
        "numerics.megatron.local:rotated", "a CPU would compute each layer's cosines again, with the same bits"),
    ReplacementRow("megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
        "numerics.megatron.local:residual_add", "four operations of which three do nothing"),
    # --- What only some machines or settings have ---
    ReplacementRow("transformer_engine.pytorch.attention.dot_product_attention.utils:get_attention_backend",
        "numerics.megatron.te_wrappers:without_flash",
        "model.attention_backend=auto allows flash-attn, whose backward groups sums by the number of heads",
        when=lambda numerics: installed("transformer-engine") is not None),
    ReplacementRow("megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32",
        "numerics.sums.grad_norm:clip_by_powers_of_two",
        "numerics.clip_rounding=pow2: scaling by a power of two is exact",
        when=lambda numerics: numerics.clip_rounding == "pow2"),
)  # fmt: skip


def replacements(numerics: NumericsSettings) -> tuple[Replacement, ...]:
    """Return the rows that a run needs, then those of its mode alone; none for stock numerics.

    numerics: of a program with a training loop of its own without data_shards: it decides which data a rank reads.
    """
    if numerics.arithmetic is None:
        return ()
    return *(row.replacement(numerics) for row in ROWS if row.when(numerics)), *numerics.arithmetic.replacements()
