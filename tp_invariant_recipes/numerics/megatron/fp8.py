"""Forward passes of invariant layers with products in FP8 (numerics/layers/fp8_linear.py).

`config.fp8_layers` says how (numerics/precision.py). numerics/megatron/spec.py puts them before the layers' classes, in
the layers of the model that are in FP8.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from tp_invariant_recipes.numerics.layers import fp8_linear
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.fp8_experts import grouped_linear
from tp_invariant_recipes.numerics.layers.fp8_linear import Scaling
from tp_invariant_recipes.numerics.layers.token_dispatcher import Batches
from tp_invariant_recipes.numerics.megatron.base import ColumnForward, ExpertsForward, RowForward


def layers_of_stack(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for HybridStack.__init__, whose specification has one class for all layers of a kind.

    As in Megatron's, layers ahead (multi-token prediction) count from the first one of their own.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        found = getattr(config, "fp8_layers", None)
        if found is None:
            return
        for layer in self.layers:
            if not found.contains(layer.layer_number - 1, config.num_layers):
                for part in (one for one in layer.modules() if isinstance(one, InFp8)):
                    part.in_bf16 = True

    return __init__


def scaling_of(config: Any) -> Scaling:
    """How the operands of a layer get their scales."""
    from megatron.core.parallel_state import get_tensor_and_context_parallel_group

    group = get_tensor_and_context_parallel_group()
    return Scaling.of(config.fp8_layers, group if group.size() > 1 else None)


class InFp8:
    """A layer whose products are in FP8. in_bf16: they are not, since a hybrid model's stack says so."""

    config: Any
    in_bf16 = False

    @cached_property
    def scaling(self) -> Scaling:
        """Looked up once, when the layer first runs."""
        return scaling_of(self.config)


class Fp8ColumnForward(InFp8, ColumnForward):
    """Forward of a column-parallel layer."""

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s/t or s, 1, k] → [s, 1, n/t]."""
        if self.in_bf16:
            return super().column(x, weight, bias)
        sequence_parallel = self.config.sequence_parallel
        y = fp8_linear.column_parallel(x, weight, self.mesh, self.segments, sequence_parallel, self.scaling)
        return y if bias is None else column_bias(y, bias, self.mesh.contexts)

    def norm_column(
        self, x: Tensor, norm: tuple[Tensor, Tensor | None], eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`column` of x's norm, two functions of autograd."""
        if self.in_bf16:
            return super().norm_column(x, norm, eps, weight, bias)
        return self.column(self.normal(x, norm, eps), weight, bias)


class Fp8RowForward(InFp8, RowForward):
    """Forward of a row-parallel layer."""

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, 1, k/t] → [s/t or s, 1, n]."""
        if self.in_bf16:
            return super().row(x, weight, bias)
        y = fp8_linear.row_parallel(x, weight, self.mesh, self.config.sequence_parallel, self.scaling)
        return y if bias is None else row_bias(y, bias, self.mesh, self.config.sequence_parallel)


class Fp8ExpertsForward(InFp8, ExpertsForward):
    """Forward of experts."""

    def experts(self, *args: Any, **more: Any) -> Tensor:
        """[r, h] → [r, h]."""
        if self.in_bf16:
            return super().experts(*args, **more)

        def linear(x: Tensor, batches: Batches, weights: Sequence[Tensor]) -> Tensor:
            return grouped_linear(x, batches, self.scaling, weights)

        return super().experts(*args, **more | {"linear": linear})
