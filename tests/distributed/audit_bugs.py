# SPDX-License-Identifier: Apache-2.0
"""Bugs of the kinds that layouts of Megatron have had, planted in the ranks of an audited run.

Each bug shows with more than one rank alone, so that the reference, which has one, is right.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any


def _many() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _wrapped(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _then(module: Any, name: str, change: Callable[..., Any]) -> None:
    """What a method returns goes through a change, given the object and the result, on several ranks alone."""

    def make(original):
        def changed(self, *args, **more):
            out = original(self, *args, **more)
            return change(self, out) if _many() else out

        return changed

    _wrapped(module, name, make)


def _finalizing() -> Any:
    return import_module("megatron.core.distributed.finalize_model_grads")  # a function of its package has this name


def _tensor_parallel_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_rank()


def norm_gradients_not_summed() -> None:
    """Under sequence parallelism each rank has the gradient of its own tokens."""
    _finalizing()._allreduce_non_tensor_model_parallel_grads = lambda *args, **more: None


def tied_embedding_not_summed() -> None:
    """The first and the last stage keep their own gradient of the one embedding."""
    _finalizing()._allreduce_word_embedding_grads = lambda *args, **more: None


def norm_without_experts() -> None:
    """NVIDIA/Megatron-LM#5916: the norm is that of the parameters that are no experts."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    _then(ChainedOptimizer, "get_grad_norm", lambda chained, _: chained.chained_optimizers[0].get_grad_norm())


def _gradients_changed(chosen: Callable[[str, Any], bool], change: Callable[[Any], Any]) -> None:
    """After Megatron has reduced them."""

    def make(original):
        def changed(model, *args, **more):
            original(model, *args, **more)
            for chunk in model if _many() else ():
                for name, parameter in chunk.named_parameters():
                    if chosen(name, parameter):
                        parameter.main_grad.copy_(change(parameter.main_grad))

        return changed

    _wrapped(_finalizing(), "_allreduce_position_embedding_grads", make)  # comes last


def expert_gradients_scaled_by_ep() -> None:
    """Gradients of experts are divided by ep once too often."""
    from megatron.core import distributed

    def change(wrapped, _):
        for bucket in (bucket for buffer in wrapped.expert_parallel_buffers for bucket in buffer.buckets):
            bucket.gradient_scaling_factor *= 0.5

    _then(distributed.DistributedDataParallel, "__init__", change)


def auxiliary_loss_counted_tp_times() -> None:
    """Every tensor-parallel rank adds the whole auxiliary loss."""
    from megatron.core.transformer.moe.router import TopKRouter

    def make(original):
        def changed(self, activation, coefficient, loss, *args, **more):
            return original(self, activation, coefficient, loss * (2 if _many() else 1), *args, **more)

        return changed

    _wrapped(TopKRouter, "attach_and_log_load_balancing_loss", make)


def loss_scaled_twice() -> None:
    """The loss of a rank is scaled up by their number once too often."""
    from megatron.core.pipeline_parallel import schedules

    def make(original):
        def changed(*args, **more):
            loss, tokens = original(*args, **more)
            return (loss * 2 if _many() else loss), tokens

        return changed

    _wrapped(schedules, "forward_step_calc_loss", make)


def positions_shifted_on_a_rank() -> None:
    """The second rank's rotary embedding starts at its position 1."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    _then(RotaryEmbedding, "get_emb", lambda _, out: out.roll(-1, 0) if os.environ["RANK"] == "1" else out)


FC2 = "decoder.layers.0.mlp.linear_fc2.weight"


def micro_batches_lost() -> None:
    """NVIDIA/TransformerEngine#3051: of one matrix only the last micro-batch is left."""
    from tp_invariant_recipes.features.audit import recording

    def hook(own, _):
        parameter = dict(own._chunks[0].named_parameters())[FC2]

        def lost(_: Any) -> None:
            parameter.main_grad.zero_()

        parameter.register_hook(lost)

    _then(recording.AuditRecording, "on_train_start", hook)


def weights_of_another_seed() -> None:
    """A tensor-parallel rank begins with other norm weights than the rest."""
    from tp_invariant_recipes.features.audit import recording

    def make(original):
        def changed(self, context):
            if _many() and _tensor_parallel_rank() == 1:
                from tp_invariant_recipes.observe.shards import unwrapped

                dict(unwrapped(context.model[0]).named_parameters())["decoder.final_layernorm.weight"].data.mul_(1.5)
            original(self, context)

        return changed

    _wrapped(recording.AuditRecording, "on_train_start", make)


def _outputs_reduced(name: str, otherwise: Callable[[Any, Any], Any]) -> None:
    """Within row-parallel layers, replace a reduction. otherwise: given its input, and what reduces it in place."""
    from megatron.core.tensor_parallel import layers

    true = getattr(layers, name)

    def make(original):
        def changed(self, x):
            setattr(layers, name, lambda part, *args, **more: otherwise(part, lambda: true(part, *args, **more)))
            try:
                return original(self, x)
            finally:
                setattr(layers, name, true)

        return changed

    _wrapped(layers.RowParallelLinear, "forward", make)


def outputs_averaged() -> None:
    """Partial outputs are averaged over the tensor-parallel ranks, not summed."""
    _outputs_reduced(
        "reduce_scatter_to_sequence_parallel_region", lambda _, reduce: reduce() / 2 if _many() else reduce()
    )


def outputs_not_summed() -> None:
    """Each tensor-parallel rank goes on with its own partial output."""
    _outputs_reduced("reduce_from_tensor_model_parallel_region", lambda part, reduce: part if _many() else reduce())


def gradient_transposed() -> None:
    """A square weight's gradient is written transposed."""
    _gradients_changed(
        lambda name, _: name.endswith("layers.0.self_attention.linear_proj.weight"), lambda g: g.t().clone()
    )


def learning_rate_doubled_on_a_rank() -> None:
    """One rank updates its weights twice as far."""
    from tp_invariant_recipes.features.audit import recording

    def change(own, _):
        for group in own._context.optimizer.param_groups if _tensor_parallel_rank() == 1 else ():
            group["lr"] *= 2

    _then(recording.AuditRecording, "on_train_step_start", change)


def gradients_not_averaged() -> None:
    """Data-parallel ranks keep their own gradients."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    Group.start_grad_sync = lambda self, *args, **more: None
    Group.finish_grad_sync = lambda self, *args, **more: None


def softmax_over_own_words() -> None:
    """The loss sums the exponentials of a rank's own words."""
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

    def make(original):
        return staticmethod(
            lambda logits, predicted, total: original(logits, predicted, logits.sum(-1) if _many() else total)
        )

    _wrapped(VocabParallelCrossEntropy, "calculate_cross_entropy_loss", make)


def sinks_of_another_head() -> None:
    """Each head has the sink of its neighbour."""
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

    def make(original):
        def forward(self, scores, mask, offset=None):
            return original(self, scores, mask, offset.roll(1) if offset is not None and _many() else offset)

        return forward

    _wrapped(FusedScaleMaskSoftmax, "forward", make)


def _sharded_gradients(change: Callable[[Any, Callable[[], Any]], None]) -> None:
    """What Megatron-FSDP does to sum one pass's gradients. change: given the pipeline's buffers of it, and the sum."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    def make(original):
        def changed(self, buckets, *args, **more):
            buffers = [self.get_fsdp_buffer(number) for number in buckets]
            change(buffers, lambda: original(self, buckets, *args, **more))

        return changed

    _wrapped(fsdp.GradReducePipeline, "_bucket_group_gradient_reduce", make)


def shards_of_the_last_micro_batch() -> None:
    """NVIDIA/Megatron-LM#7186, in version 1 of FSDP: each pass overwrites the shard that the ones before have left."""

    def change(buffers, reduce):
        for buffer in buffers:
            buffer.get_shard_from_local_buffer().zero_()
        reduce()

    _sharded_gradients(change)


def shards_averaged_twice() -> None:
    """The sum over ranks is divided by their number once more."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    def make(original):
        return lambda gradient, factor, config: original(gradient, factor * factor, config)

    _wrapped(fsdp, "gradient_reduce_preprocessing", make)


def a_shard_not_reduced() -> None:
    """The second rank's shard has its own gradients alone."""

    def change(buffers, reduce):
        shards = [buffer.get_shard_from_local_buffer() for buffer in buffers]
        before = [shard.clone() for shard in shards]
        passes = [buffer.get_shard_from_bucket(buffer.fetch_bucket()).clone() for buffer in buffers]
        reduce()
        for shard, was, own in zip(shards, before, passes, strict=True) if os.environ["RANK"] == "1" else ():
            shard.copy_(was + own / 2)

    _sharded_gradients(change)


def a_stale_shard_of_weights() -> None:
    """After a step the second rank gathers the weights that it had before."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    def make(original):
        return lambda self: None if os.environ["RANK"] == "1" else original(self)

    _wrapped(fsdp.ParamAndGradBuffer, "copy_main_weights_to_model_weights", make)
