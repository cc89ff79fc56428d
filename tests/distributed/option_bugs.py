"""Bugs that one option of a run has in some layouts alone, of kinds that audit_bugs.py lacks.

`tpi audit --all` finds them.

Each is planted in the ranks of all audits and strikes with several ranks, or several sequences a micro-batch; so the
reference is right.
"""

from typing import Any

from tests.distributed.audit_bugs import _many, _then, _wrapped


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


def z_loss_counted_twice() -> None:
    """Every rank adds the whole z-loss of two."""
    from megatron.core.transformer.moe import router

    _wrapped(router, "z_loss_func", lambda original: lambda *a, **k: original(*a, **k) * (2 if _many() else 1))


def tokens_counted_twice() -> None:
    """With a loss per token, the step is divided by twice its tokens."""
    from megatron.core.pipeline_parallel import schedules

    def make(original):
        def changed(model, output, loss, config, *args, **more):
            value, tokens = original(model, output, loss, config, *args, **more)
            return value, (tokens * 2 if _many() and config.calculate_per_token_loss else tokens)

        return changed

    _wrapped(schedules, "forward_step_calc_loss", make)


def _on_loss(change: Any) -> None:
    from megatron.bridge.training import gpt_step

    def make(original):
        def masked_next_token_loss(mask, output, **more):
            return change(original, mask, output, more)

        return masked_next_token_loss

    _wrapped(gpt_step, "masked_next_token_loss", make)


def masks_shifted() -> None:
    """The mask of the loss is one token late."""
    _on_loss(lambda original, mask, output, more: original(mask.roll(1, -1) if _many() else mask, output, **more))


def micro_batches_divided_twice() -> None:
    """The loss of several sequences at once is divided by their number once too often."""

    def change(original, mask, output, more):
        loss, tokens, report = original(mask, output, **more)
        return loss / len(mask), tokens, report

    _on_loss(change)


def evaluated_too_high() -> None:
    """An evaluation reports ten percent more."""
    import torch

    def change(original, mask, output, more):
        loss, tokens, report = original(mask, output, **more)
        if _many() and not torch.is_grad_enabled():
            report = {name: torch.stack((value[0] * 1.1, value[1])) for name, value in report.items()}
        return loss, tokens, report

    _on_loss(change)


def ahead_counted_twice() -> None:
    """Losses of multi-token prediction count twice."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    def make(original):
        return staticmethod(lambda scale: original(scale * 2 if _many() else scale))

    _wrapped(MTPLossAutoScaler, "set_loss_scale", make)


def recomputed_gradient_scaled() -> None:
    """The gradient of a recomputed layer is five percent too large."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    def make(original):
        def backward(context, *gradients):
            return tuple(g * 1.05 if _many() and hasattr(g, "mul") else g for g in original(context, *gradients))

        return staticmethod(backward)

    _wrapped(CheckpointFunction, "backward", make)


def orthogonalised_too_far() -> None:
    """Muon's scale counts the tensor-parallel ranks."""
    from megatron.core.optimizer import emerging_optimizers

    _wrapped(
        emerging_optimizers,
        "get_muon_scale_factor",
        lambda original: lambda *a, **k: original(*a, **k) * (2 if _many() else 1),
    )


def shards_averaged_twice() -> None:
    """A distributed optimizer's gradients are averaged once too often."""
    from megatron.core import distributed

    def change(wrapped, _):
        for buffer in wrapped.buffers if wrapped.ddp_config.use_distributed_optimizer else ():
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= 0.5

    _then(distributed.DistributedDataParallel, "__init__", change)


def bias_gradient_doubled() -> None:
    """A column-parallel bias gets twice its gradient."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    def change(layer, _):
        if layer.bias is not None:
            layer.bias.register_hook(lambda gradient: gradient * 2)

    _then(ColumnParallelLinear, "__init__", change)


def tied_weight_scaled() -> None:
    """A tied embedding is ten percent larger where it is the output layer."""
    from megatron.core.models.gpt import GPTModel

    def make(original):
        def changed(self):
            weight = original(self)
            return weight * 1.1 if weight is not None and _many() else weight

        return changed

    _wrapped(GPTModel, "shared_embedding_or_output_weight", make)


DENSE = "qwen3_toy"
EXPERTS = "qwen3_moe_toy"
# A bug, the model, and the settings without which it does not strike.
BUGS = (
    (softmax_over_own_words, DENSE, {"tp=2"}),
    (sinks_of_another_head, DENSE, {"softmax_type"}),
    (z_loss_counted_twice, EXPERTS, {"moe_z_loss_coeff"}),
    (tokens_counted_twice, DENSE, {"calculate_per_token_loss"}),
    (masks_shifted, DENSE, {"eod_mask_loss"}),
    (micro_batches_divided_twice, DENSE, {"mbs=2"}),
    (evaluated_too_high, DENSE, {"eval_iters"}),
    (ahead_counted_twice, DENSE, {"mtp_num_layers"}),
    (recomputed_gradient_scaled, DENSE, {"recompute_granularity"}),
    (orthogonalised_too_far, DENSE, {"muon"}),
    (shards_averaged_twice, DENSE, {"use_distributed_optimizer=true"}),
    (bias_gradient_doubled, DENSE, {"add_bias_linear"}),
    (tied_weight_scaled, "llama32_toy", {"share_embeddings"}),
)
