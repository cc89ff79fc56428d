"""Megatron-Bridge builds the layers of multi-token prediction of Transformer Engine, whatever the others are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tp_invariant_recipes.patches import code
from tp_invariant_recipes.patches.patch import Looks, Patch

WHY = (
    "with model.transformer_impl=local Megatron-Bridge still asks for Transformer Engine's layers for multi-token "
    "prediction, and fails where it is not installed"
)


def of_the_models_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace mtp_block_spec: local layers for a model of local layers."""

    def mtp_block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if config.transformer_impl != "local" or not config.mtp_num_layers:
            return original(config, vp_stage=vp_stage)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        layers = config.transformer_layer_spec(config)
        block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)
        if block is None:
            return None
        norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
        return replace(
            block,
            layer_specs=[replace(spec, submodules=replace(spec.submodules, **norms)) for spec in block.layer_specs],
        )

    return mtp_block_spec


def always_transformer_engine() -> bool:
    """Whether the installed function names Transformer Engine's layers alone."""
    function = code.source("megatron.bridge", "models/gpt_provider.py", "mtp_block_spec")
    return "use_transformer_engine=True" in function and "transformer_impl" not in function


PATCH = Patch(
    name="bridge-local-mtp",
    package="megatron-bridge",
    need=Looks(always_transformer_engine, "mtp_block_spec() without model.transformer_impl"),
    replaces={"megatron.bridge.models.gpt_provider:mtp_block_spec": of_the_models_kind},
    why=WHY,
    concerns=lambda config: config is None or bool(config.shape.depths),
)

UNMASKED = (
    "with model.mtp_num_layers every token counts in the losses of multi-token prediction, masked prompts and padding "
    "as well: Megatron-Bridge does not pass the loss mask to the model"
)
_LATEST_MASK: list[Any] = [None]  # the loss mask of the latest micro-batch


def keeping_the_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace gpt_step.get_batch: the third of what it returns is the mask, [sequences, tokens of this rank]."""

    def get_batch(*args: Any, **more: Any) -> Any:
        batch = original(*args, **more)
        _LATEST_MASK[0] = batch[2]
        return batch

    return get_batch


def with_the_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace gpt_model.process_mtp_loss: without a mask it takes the micro-batch's."""

    def process_mtp_loss(*args: Any, loss_mask: Any = None, **more: Any) -> Any:
        return original(*args, loss_mask=_LATEST_MASK[0] if loss_mask is None else loss_mask, **more)

    return process_mtp_loss


def without_a_mask() -> bool:
    """Whether the installed step keeps the mask for the loss alone."""
    step = code.source("megatron.bridge", "training/gpt_step.py", "_forward_step_common")
    return '"labels": labels,' in step and '"loss_mask": loss_mask' not in step


MASK_PATCH = Patch(
    name="bridge-mtp-mask",
    package="megatron-bridge",
    need=Looks(without_a_mask, "a gpt_step that does not pass the loss mask"),
    replaces={
        "megatron.bridge.training.gpt_step:get_batch": keeping_the_mask,
        "megatron.core.models.gpt.gpt_model:process_mtp_loss": with_the_mask,
        "megatron.core.models.hybrid.hybrid_model:process_mtp_loss": with_the_mask,
    },
    why=UNMASKED,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103",
    concerns=lambda config: (
        config is None or bool(config.shape.depths and not config.numerics.invariant and config.layout.cp == 1)
    ),
)
