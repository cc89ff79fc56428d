"""Invariant layers with products in FP8 (numerics/layers/formats/fp8.py, mxfp8.py).

`config.fp8_layers` says how (numerics/precision.py). numerics/megatron/spec.py puts `Fp8Mixin` before the layers'
classes, in the layers of the model that are in FP8.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from tp_invariant_recipes.numerics import mode
from tp_invariant_recipes.numerics.layers.formats import Format
from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8
from tp_invariant_recipes.numerics.layers.formats.mxfp8 import Mxfp8
from tp_invariant_recipes.numerics.megatron.base import WithProducts
from tp_invariant_recipes.numerics.precision import Fp8Layers


def layers_of_stack(original: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for HybridStack.__init__, whose specification has one class for all layers of a kind.

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


def operands_of(layers: Fp8Layers, arithmetic: "mode.Mode", group: Any) -> Format:
    """Operands of layers in FP8. group: of the ranks that share a sequence; None: one rank has all."""
    if layers.recipe == "mxfp8":
        return Mxfp8.from_layers(layers, arithmetic.operands().products)
    return Fp8.from_layers(layers, group)


class Fp8Mixin(WithProducts):
    """A layer whose products are in FP8. in_bf16: they are not, since a hybrid model's stack says so."""

    in_bf16 = False

    @property
    def operands(self) -> Format:
        """As Plain's where the layer is in bf16."""
        return super().operands if self.in_bf16 else self._fp8

    @cached_property
    def _fp8(self) -> Format:
        from megatron.core.parallel_state import get_tensor_and_context_parallel_group

        group = get_tensor_and_context_parallel_group()
        return operands_of(self.config.fp8_layers, mode.mode_of(self.config), group if group.size() > 1 else None)
