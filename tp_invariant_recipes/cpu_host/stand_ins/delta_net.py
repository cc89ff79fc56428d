"""What Megatron's gated delta net takes of flash-linear-attention, in plain torch, for a CPU: the kernels need a GPU.

The rule itself is Megatron-Core's own torch function, `torch_chunk_gated_delta_rule`.
"""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.cpu_host.stand_ins import mamba
from tp_invariant_recipes.replacement import Replacement

_PACKAGE = "megatron.core.ssm.gated_delta_net"
_WHY = "flash-linear-attention's kernels may be installed but need a GPU"


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x²) + eps) over a dimension in fp32, `fla.modules.l2norm.l2norm`. returns: x's shape and dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **unused: Any
) -> tuple[Tensor, None]:
    """Return a causal convolution per channel, `fla.modules.convolution.causal_conv1d`.

    x: [batch, seq, channels]; weight: [channels, width]; bias: [channels]. returns: x's shape and dtype, and no state.
    Raises NotImplementedError for packed sequences.
    """
    if unused.get("cu_seqlens") is not None:
        raise NotImplementedError("packed sequences in gated delta nets on a CPU")
    return mamba.causal_conv1d(x.transpose(1, 2), weight, bias, activation).transpose(1, 2), None


def _rule(original: Any) -> Any:
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule


REPLACEMENTS = (
    Replacement(f"{_PACKAGE}.common:HAVE_FLA", lambda _: True, _WHY),
    Replacement(f"{_PACKAGE}.common:l2norm", lambda _: l2norm, _WHY),
    Replacement(f"{_PACKAGE}.gdn:causal_conv1d", lambda _: causal_conv1d, _WHY),
    Replacement(f"{_PACKAGE}.gdn:chunk_gated_delta_rule", _rule, _WHY),
)
