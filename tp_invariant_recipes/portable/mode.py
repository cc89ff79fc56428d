# SPDX-License-Identifier: Apache-2.0
"""numerics=portable: the sums of numerics=tree, over operations that are specified to the last bit."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tp_invariant_recipes.cpu_host.stand_ins import torch_adam
from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.tree_modes import Tree
from tp_invariant_recipes.replacement import Replacement, instead, wrapped

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers import cross_entropy, norm
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain

LAYERS = {
    "DotProductAttention": "portable.layers:PortableDotProductAttention",
    "TopKRouter": "portable.layers:PortableTopKRouter",
    "SequentialMLP": "portable.layers:PortableSequentialMLP",
    "MLADotProductAttention": "portable.layers:PortableMLADotProductAttention",
    "GatedDeltaNet": "portable.delta_net:PortableGatedDeltaNet",
}
_STATED = "a library's function is not bitwise identical on another machine"
REPLACEMENTS = (
    instead("megatron.core.transformer.mlp:MLP.forward", "portable.layers:mlp_forward", _STATED),
    instead("megatron.core.transformer.attention:apply_rotary_pos_emb", "portable.layers:apply_rotary_pos_emb",
        _STATED),
    instead("tp_invariant_recipes.numerics.megatron.attention.mla:apply_rotary_pos_emb",
        "portable.layers:apply_rotary_pos_emb", _STATED),
    instead("megatron.core.transformer.attention:Attention._apply_output_gate", "portable.layers:apply_output_gate",
        _STATED),
    instead("megatron.core.models.gpt.moe_module_specs:SharedExpertMLP", "portable.layers:PortableSharedExpertMLP",
        _STATED),
    *torch_adam.REPLACEMENTS,
    wrapped("torch.optim:AdamW", "portable.training:portable_adam", _STATED),
    wrapped("torch.optim:Adam", "portable.training:portable_adam", _STATED),
    instead("megatron.core.optimizer.clip_grads:multi_tensor_scale_impl", "portable.training:scale", _STATED),
    wrapped("megatron.core.optimizer_param_scheduler:math", "portable.training:portable_math", _STATED),
    wrapped("megatron.bridge.training.gpt_step:masked_next_token_loss", "portable.training:masked_next_token_loss",
        "torch adds the tokens' losses in an order that depends on the processor's vectors"),
)  # fmt: skip


class Portable(Tree):
    """Equal bits for every layout, and on every machine that passes `require_machine`."""

    name: str = "portable"
    covers: frozenset[str] = frozenset(
        {mode.EXPERTS, mode.LATENT, mode.DELTA_NET, mode.GATES, mode.CENTRED, mode.FP8, mode.GUARD}
    )
    graphs: frozenset[str] = frozenset({"full"})
    any_machine: bool = True
    layers: Mapping[str, str] = MappingProxyType(LAYERS)

    def definition(self, device: str) -> str | None:
        """None: the name of its attention has the version of all that it states."""
        return None

    def require_machine(self, gpu: int | None, *, fp8: bool = False) -> None:
        """Compute recorded cases, once a process and device."""
        from tp_invariant_recipes.portable.definition import require_conformance

        require_conformance(gpu, fp8=fp8)

    def operands(self) -> "Plain":
        """Products by numerics/gemm/defined.py."""
        from tp_invariant_recipes.numerics.gemm import defined
        from tp_invariant_recipes.numerics.layers.formats.plain import Gemms, Plain

        return Plain(Gemms(defined.gemm, defined.partials))

    def norm(self) -> "norm.NormKernels":
        """portable/ieee/norm.py."""
        from tp_invariant_recipes.numerics.layers import norm
        from tp_invariant_recipes.portable.ieee import norm as ieee_norm

        return norm.NormKernels(ieee_norm.rms_norm_forward, ieee_norm.rms_norm_backward)

    def cross_entropy(self) -> "cross_entropy.LossKernels":
        """portable/ieee/cross_entropy.py."""
        from tp_invariant_recipes.numerics.layers import cross_entropy
        from tp_invariant_recipes.portable.ieee import cross_entropy as ieee

        return cross_entropy.LossKernels(ieee.sum_of_exponentials, ieee.softmax_gradient, ieee.logarithm)

    def replacements(self) -> tuple[Replacement, ...]:
        """Functions of Megatron and torch whose operations are specified instead."""
        return REPLACEMENTS


MODE = Portable()
