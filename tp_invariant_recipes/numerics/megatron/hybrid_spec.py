"""Layer specifications for hybrid models (Mamba-2, attention, MLP and expert layers in one stack)."""

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as ahead
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from tp_invariant_recipes import saved_names
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.machine.versions import installed
from tp_invariant_recipes.numerics.megatron import spec
from tp_invariant_recipes.numerics.megatron.hybrid_layers import AHEAD, LAYERS, SEPARATOR
from tp_invariant_recipes.replacement import resolve_own


def local_hybrid_spec(config: Any) -> Any:
    """Return a hybrid stack of Megatron-Core's local layers, which Megatron-Core lacks. For `model.hybrid_stack_spec`.

    It equals Megatron's stack with Transformer Engine, except that norms are separate modules. Checkpoints have the
    same names.
    """
    layers = {
        "mamba_layer": _mamba_layer(),
        "attention_layer": _attention_layer(),
        "mlp_layer": _feed_forward_layer(MLPLayer, sharded_state_dict_keys_map=saved_names.DENSE),
    }
    if experts := config.num_moe_experts:
        layers["moe_layer"] = _feed_forward_layer(MoETransformerLayer, experts)
    if config.mtp_num_layers:
        layers["mtp_block_spec"] = _local_ahead()
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))


def _mamba_layer() -> Any:
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=WrappedTorchNorm,
            mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_names.MAMBA,
        ),
    )


def _attention_layer() -> Any:
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=saved_names.ATTENTION,
        ),
    )


def _feed_forward_layer(module: type, experts: int | None = None, **names: Any) -> Any:
    """Return a layer with a dense feed-forward part, or with experts."""
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=get_mlp_module_spec_for_backend(LocalSpecProvider(), num_experts=experts),
            mlp_bda=get_bias_dropout_add,
            **names,
        ),
    )


def _local_ahead() -> Any:
    """Multi-token prediction's norms and projection. Megatron builds its layers of the stack's own specification."""
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    parts = ahead.MultiTokenPredictionLayerSubmodules(**norms, eh_proj=ColumnParallelLinear, mtp_model_layer=None)
    layer = ModuleSpec(module=ahead.MultiTokenPredictionLayer, submodules=parts)
    block = ahead.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=ahead.MultiTokenPredictionBlock, submodules=block)


def final_norm(original: Any) -> Any:
    """Return the norm at the end of a HybridStack. It exists only with Transformer Engine or on our CPU host; hybrid
    models
    need one of them."""
    absent = original.__name__ == "TENorm" and installed("transformer-engine") is None  # or a placeholder of it
    return original if absent else resolve_own(spec.SUBSTITUTES[original.__name__])


def invariant_hybrid_spec(config: Any) -> Any:
    """Return the local stack, or Megatron's with Transformer Engine, of invariant layers.

    For `model.hybrid_stack_spec`.

    Raises ConfigError for a layer that has no invariant version.
    """
    stock = local_hybrid_spec(config) if config.transformer_impl == "local" else hybrid_layer_specs.hybrid_stack_spec
    signs = set(config.hybrid_layer_pattern) - {SEPARATOR, AHEAD}
    if unknown := sorted(signs - set(LAYERS)):
        raise ConfigError(
            f"model.hybrid_layer_pattern: {' '.join(unknown)} have no invariant version, only {' '.join(LAYERS)} have; "
            f"numerics=stock"
        )
    # Megatron's stack has every kind of layer; kinds that the model does not use need no invariant version.
    in_fp8 = getattr(config, "fp8_layers", None) is not None  # fp8.layers_of_stack says of each layer whether it is
    names = [LAYERS[sign] for sign in signs]
    used = {name: spec.invariant(getattr(stock.submodules, name), fp8=in_fp8) for name in names}
    if config.mtp_num_layers:
        used["mtp_block_spec"] = spec.invariant(stock.submodules.mtp_block_spec)
    return replace(stock, submodules=HybridStackSubmodules(**used))
