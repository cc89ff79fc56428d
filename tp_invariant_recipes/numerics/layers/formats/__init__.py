# SPDX-License-Identifier: Apache-2.0
"""How matrices become operands of products: as they are, in MXFP8, in FP8, or gathered whole. A file each."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_invariant_recipes.numerics.layers.formats.fp8 import Fp8
    from tp_invariant_recipes.numerics.layers.formats.plain import Plain

type Format = Plain | Fp8
