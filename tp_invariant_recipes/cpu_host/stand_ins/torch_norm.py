"""Megatron-Core's local norm for a CPU: its own refuses sequence parallelism and weights that are centred at zero."""

from typing import Any

import torch
from torch import Tensor

from tp_invariant_recipes.replacement import Replacement


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


REPLACEMENTS = (
    Replacement("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _torch_norm,
        "the local norm refuses sequence parallelism, persist_layer_norm and weights centred at zero"),
)  # fmt: skip
