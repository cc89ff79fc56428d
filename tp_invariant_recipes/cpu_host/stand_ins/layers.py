# SPDX-License-Identifier: Apache-2.0
"""Layers in plain torch for a CPU, where Megatron takes Transformer Engine, Apex or flash-linear-attention.

The rule of the gated delta net itself is Megatron-Core's own torch function, `torch_chunk_gated_delta_rule`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.cpu_host.stand_ins import mamba
from tp_invariant_recipes.replacement import Replacement

_PACKAGE = "megatron.core.ssm.gated_delta_net"
_NEEDS_GPU = "flash-linear-attention's kernels may be installed but need a GPU"


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


DELTA_NET = (
    Replacement(f"{_PACKAGE}.common:HAVE_FLA", lambda _: True, _NEEDS_GPU),
    Replacement(f"{_PACKAGE}.common:l2norm", lambda _: l2norm, _NEEDS_GPU),
    Replacement(f"{_PACKAGE}.gdn:causal_conv1d", lambda _: causal_conv1d, _NEEDS_GPU),
    Replacement(f"{_PACKAGE}.gdn:chunk_gated_delta_rule", _rule, _NEEDS_GPU),
)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every rank holds whole, for its slice of the tokens. Transformer Engine's TELinear has this
    mode, and Megatron-Core's local layers have not. Megatron sums the ranks' gradients (`sequence_parallel`)."""

    def __init__(self, inputs: int, features: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(
            torch.empty(features, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.__dict__["sequence_parallel"] = config.sequence_parallel

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """As Megatron saves a module without this method; Bridge asks an adapted layer for it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {}, sharded_offsets
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[s/t, b, k] → [s/t, b, n], and None as bias."""
        return torch.nn.functional.linear(x, self.weight), None


class CentredRMSNorm(torch.nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · (1 + weight) in fp32, rounded once, as Transformer Engine has it."""

    def reset_parameters(self) -> None:
        """Set the factor to 1."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[…, h] → the same."""
        weight = self.weight.float() + 1.0
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


def _torch_norm(original: Any) -> staticmethod:
    """Return a local norm. It marks the weight for sequence parallelism as Transformer Engine's does."""

    def build(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        centred = kind is torch.nn.RMSNorm and config.layernorm_zero_centered_gamma
        norm = (CentredRMSNorm if centred else kind)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(build)


NORM = (
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _torch_norm,
        "the local norm refuses sequence parallelism, persist_layer_norm and weights centred at zero"),
)  # fmt: skip


_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"


def _built_for_single_rank(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config: Any, *args: Any, **more: Any) -> None:
        if not _stock(config):
            return original(self, config, *args, **more)
        shards, config.context_parallel_size = config.context_parallel_size, 1
        try:
            original(self, config, *args, **more)
        finally:
            config.context_parallel_size = shards

    return __init__


def _over_all_ranks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **more: Any) -> Tensor:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        if group.size() == 1 or not _stock(self.config):
            return original(self, query, key, value, mask, *args, **more)
        own = rows(len(query) * group.size(), group.size())
        order = torch.cat(own).argsort()
        whole = (gather_from_sequence_parallel_region(x, group=group)[order] for x in (query, key, value))
        return original(self, *whole, None, *args, **more)[own[group.rank()]]  # a causal mask is the default

    return forward


def _stock(config: Any) -> bool:
    """Whether a model has Megatron's numerics: the invariant attention gathers keys by itself."""
    return getattr(config, "invariant_mode", None) is None


def rows(length: int, shards: int) -> list[Tensor]:
    """Each context-parallel rank's positions, int64 [length/shards]: one chunk from the front, one from the back."""
    chunks = torch.arange(length).chunk(2 * shards)
    return [torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(shards)]


_WHY = "stock context parallelism is otherwise Transformer Engine's, and no audit on a CPU would see its losses"
CONTEXT_ATTENTION = (
    Replacement(f"{_ATTENTION}.__init__", _built_for_single_rank, _WHY),
    Replacement(f"{_ATTENTION}.forward", _over_all_ranks, _WHY),
)
