# SPDX-License-Identifier: Apache-2.0
"""Which GEMMs of a model are in FP8, and how their operands get scales. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

# What a ledger's header calls the arithmetic of the GEMMs (kernels/gemm/fp8_tiles.py) and of scales (quantize.py).
DEFINITION = "fp8 tiles 1"
# And that of rounding to MXFP8 (kernels/gemm/mxfp8.py); its GEMMs are those of bf16.
MXFP8 = "mxfp8 1"


@dataclass(frozen=True)
class Fp8Layers:
    """Products of a transformer's linear layers in FP8; attention, embedding, output layer, norms and routers in bf16.

    recipe:    tensorwise: one scale for a tensor of one sequence, from the tensor itself; blockwise: one for 128
               numbers of activations and gradients along the sum, and for blocks of 128 by 128 weights; mxfp8: a power
               of two for 32 numbers along the sum.
    gradients: the type of what backward passes are given; activations and weights are e4m3.
    first, last: how many layers at the start and at the end of the model are in bf16.
    """

    recipe: Literal["tensorwise", "blockwise", "mxfp8"]
    gradients: Literal["e4m3", "e5m2"] = "e5m2"
    first: int = 0
    last: int = 0

    @property
    def definition(self) -> str:
        """As a ledger's header names it (`fp8` in `device`)."""
        return MXFP8 if self.recipe == "mxfp8" else DEFINITION

    def contains(self, layer: int, layers: int) -> bool:
        """Whether layer 0, 1, … of so many is in FP8."""
        return self.first <= layer < layers - self.last
