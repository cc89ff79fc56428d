"""Forward passes of invariant layers with products in FP8 (numerics/layers/linear/fp8_linear.py, mxfp8_linear.py).

`config.fp8_layers` says how (numerics/precision.py). numerics/megatron/spec.py puts them before the layers' classes, in
the layers of the model that are in FP8.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.bias import column_bias, row_bias
from tp_invariant_recipes.numerics.layers.experts import fp8_experts, mxfp8_experts
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches
from tp_invariant_recipes.numerics.layers.linear.fp8_linear import Fp8Linear, Scaling
from tp_invariant_recipes.numerics.layers.linear.mxfp8_linear import Mxfp8Linear
from tp_invariant_recipes.numerics.megatron.base import ColumnForward, ExpertsForward, RowForward
from tp_invariant_recipes.numerics.precision import Fp8Layers


def layers_of_stack(original: Callable[..., None]) -> Callable[..., None]:
    """A replacement for HybridStack.__init__, whose specification has one class for all layers of a kind.

    As in Megatron's, layers ahead (multi-token prediction) count from the first one of their own.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        fp8_layers = getattr(config, "fp8_layers", None)
        if fp8_layers is None:
            return
        for layer in self.layers:
            if not fp8_layers.contains(layer.layer_number - 1, config.num_layers):
                for part in (module for module in layer.modules() if isinstance(module, Fp8Mixin)):
                    part.in_bf16 = True

    return __init__


def linear_of(layers: Fp8Layers, arithmetic: mode.Mode, group: Any) -> Fp8Linear | Mxfp8Linear:
    """The products of layers in FP8. group: of the ranks that share a sequence; None: one rank has all."""
    if layers.recipe == "mxfp8":
        return Mxfp8Linear.from_layers(layers, arithmetic.products())
    return Fp8Linear(Scaling.from_layers(layers, group))


class Fp8Mixin:
    """A layer whose products are in FP8. in_bf16: they are not, since a hybrid model's stack says so."""

    config: Any
    in_bf16 = False

    @cached_property
    def linear(self) -> Fp8Linear | Mxfp8Linear:
        """Looked up once, when the layer first runs."""
        from megatron.core.parallel_state import get_tensor_and_context_parallel_group

        group = get_tensor_and_context_parallel_group()
        return linear_of(self.config.fp8_layers, mode.mode_of(self.config), group if group.size() > 1 else None)


class Fp8ColumnForward(Fp8Mixin, ColumnForward):
    """Forward of a column-parallel layer."""

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s/t or s, 1, k] → [s, 1, n/t]."""
        if self.in_bf16:
            return super().column(x, weight, bias)
        y = self.linear.column_parallel(x, weight, self.mesh, self.segments, self.config.sequence_parallel)
        return y if bias is None else column_bias(y, bias, self.mesh.contexts)

    def norm_column(
        self, x: Tensor, norm: tuple[Tensor, Tensor | None], eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`column` of x's norm, two functions of autograd."""
        if self.in_bf16:
            return super().norm_column(x, norm, eps, weight, bias)
        return self.column(self.normal(x, norm, eps), weight, bias)


class Fp8RowForward(Fp8Mixin, RowForward):
    """Forward of a row-parallel layer."""

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[s, 1, k/t] → [s/t or s, 1, n]."""
        if self.in_bf16:
            return super().row(x, weight, bias)
        y = self.linear.row_parallel(x, weight, self.mesh, self.config.sequence_parallel)
        return y if bias is None else row_bias(y, bias, self.mesh, self.config.sequence_parallel)


class Fp8ExpertsForward(Fp8Mixin, ExpertsForward):
    """Forward of experts."""

    def experts(self, *args: Any, **more: Any) -> Tensor:
        """[r, h] → [r, h]."""
        if self.in_bf16:
            return super().experts(*args, **more)

        def grouped(x: Tensor, batches: Batches, weights: Sequence[Tensor]) -> Tensor:
            if isinstance(self.linear, Mxfp8Linear):
                return mxfp8_experts.grouped_linear(x, batches, self.linear.gradients, self.arithmetic, weights)
            return fp8_experts.grouped_linear(x, batches, self.linear.scaling, weights)

        return super().experts(*args, **more | {"linear": grouped})
