# SPDX-License-Identifier: Apache-2.0
"""What a configuration asks for in low precision, and what a run says of it."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.numerics.precision import DEFINITION, MXFP8
from tp_invariant_recipes.settings import low_precision

IN_BF16 = "MXFP8's numbers are multiplied in bf16 on any GPU, and rounding takes time beside that"
BF16_WEIGHTS = "weights are kept in bf16 and quantized once a step, as with fp8_param_gather=false"
# Words -> whether tensor cores multiply FP8, the name of the definition, what the run says.
ROWS = {
    "precision=bf16": (False, None, None),
    "precision=fp8_blockwise numerics.virtual_shards=1": (True, DEFINITION, None),
    "precision=mxfp8": (False, MXFP8, f"precision=mxfp8: {IN_BF16}"),
    "mixed_precision=bf16_with_mxfp8_mixed": (
        False,
        MXFP8,
        f"mixed_precision=bf16_with_mxfp8_mixed: {IN_BF16}; {BF16_WEIGHTS.replace('once a step', 'in every pass')}",
    ),
    "mixed_precision=bf16_with_fp8_current_scaling_mixed": (
        True,
        DEFINITION,
        f"mixed_precision=bf16_with_fp8_current_scaling_mixed: {BF16_WEIGHTS}",
    ),
    "precision=mxfp8 numerics=stock device=gpu": (True, None, None),
}


@pytest.mark.parametrize("words", ROWS)
def test_what_is_in_low_precision(words):
    config = compose("qwen3_toy", ["seq=128", *words.split()]).config
    layers = low_precision.fp8_layers(config)
    result = low_precision.adds_fp8(config), layers and layers.definition, low_precision.remark(config)
    assert result == ROWS[words]


def test_gradients_of_mxfp8_are_e4m3_unless_hybrid():
    for words, expected in (
        (("precision=mxfp8",), "e4m3"),
        (("precision=mxfp8", "mixed_precision.fp8=hybrid"), "e5m2"),
    ):
        assert low_precision.fp8_layers(compose("qwen3_toy", words).config).gradients == expected
