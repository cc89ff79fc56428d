"""A linear layer that no rank splits, which Megatron-Core has of Transformer Engine's alone."""

from typing import Any

import torch
from torch import Tensor


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
