# SPDX-License-Identifier: Apache-2.0
"""Training in FP8 on a CPU: what is set counts. Layouts: rows.py.

Stock FP8 needs Transformer Engine, so its control is tests/gpu/test_layouts_gpu.py.
"""

import pytest

from tests.distributed.layouts.rows import BLOCKWISE, BY_32, HYBRID, NAMED, SINGLE_LAYER, SMALL, TENSORWISE
from tests.distributed.scenario import unequal


@pytest.mark.release
def test_another_format_or_precision_differs(scenario):
    """Tokens that a rank rounds by itself: tests/distributed/numerics/linear/test_mxfp8_linear.py."""
    fixed = scenario(f"{SINGLE_LAYER} {BY_32}", "tp=1")
    others = [fixed(text).ledger()[0].gradients for text in ("mixed_precision.fp8=hybrid", "precision=bf16")]
    assert fixed.ledger()[0].gradients not in others


@pytest.mark.release
def test_precisions_have_other_bits(scenario):
    """Also: the first and last layers of a recipe that keeps them in bf16 are in bf16, which is all of two."""
    ledgers = [scenario(SINGLE_LAYER, p, "tp=1").ledger() for p in (TENSORWISE, BLOCKWISE, "precision=bf16")]
    assert len({str(ledger[0].gradients) for ledger in ledgers}) == 3
    named = scenario(f"{SMALL} {NAMED} iters=1 gbs=1").ledger()
    assert unequal(named, scenario(f"{SMALL} precision=bf16 iters=1 gbs=1").ledger()) == []


@pytest.mark.release
def test_layers_of_a_hybrid_model_are_in_fp8_by_their_number(scenario):
    """Its specification has one class for all layers of a kind: two layers whose ends are in bf16 have none in FP8."""
    short = f"{HYBRID} model.hybrid_layer_pattern=MM iters=1"
    words = [f"{short} {NAMED}", f"{short} precision=bf16", f"{short} {TENSORWISE}"]
    named, plain, fp8 = (scenario(word, "tp=1").ledger()[0].gradients for word in words)
    assert named == plain != fp8


def test_a_recipe_whose_precision_is_one_of_bridges_has_its_name(bridge):
    """What tpi then takes by name (settings/low_precision.py), with the fields of FP8 that Bridge gives it."""
    from megatron.bridge.training.mixed_precision import bf16_mixed, get_mixed_precision_config

    from tp_invariant_recipes.settings import low_precision
    from tp_invariant_recipes.sources import recipe_fields

    plain = bf16_mixed()
    for name, fields in low_precision.NAMED.items():
        precision = get_mixed_precision_config(name)
        assert recipe_fields.precision(precision) == name
        assert {key: getattr(precision, key) for key in fields} == fields
        changed = {key for key, value in vars(precision).items() if value != getattr(plain, key)}
        kept = set(low_precision.FP8_WEIGHTS) if name in low_precision.KEEPING else set()
        kept |= {low_precision.REUSED} if "mxfp8" in name else set()
        assert changed <= fields.keys() | kept  # nothing else that a run with invariant numerics would lose
        assert bool(changed & kept) == bool(kept)
        precision.grad_reduce_in_fp32 = False
        assert recipe_fields.precision(precision)["fp8_recipe"] == fields["fp8_recipe"]
