"""Which audits of a campaign show one fault, and which need no repetition."""

from dataclasses import replace

from tp_invariant_recipes.features.audit.result import BEYOND, FAILED, NOT_DECIDED, WITHIN, Trial

WRONG = Trial(("tp=2",), BEYOND, "text", "gradients decoder.layers.1.mlp.experts.7.linear_fc2", 1.0)


def test_one_fault_is_that_of_a_tensor_in_any_layer_and_the_same_known_one():
    assert WRONG.same_fault(replace(WRONG, first="gradients decoder.layers.0.mlp.experts.3.linear_fc2", text="other"))
    assert not WRONG.same_fault(replace(WRONG, first="gradients decoder.layers.1.mlp.experts.7.linear_fc1"))
    assert not WRONG.same_fault(replace(WRONG, known="another fault of the same tensor"))
    assert not WRONG.same_fault(replace(WRONG, verdict=WITHIN))


def test_cells_without_a_fault_are_not_reaudited():
    verdicts = (WITHIN, NOT_DECIDED, BEYOND, FAILED)
    assert [replace(WRONG, verdict=verdict).covers for verdict in verdicts] == [True, True, False, False]


def test_any_rank_may_be_the_first_to_fail():
    failed = replace(WRONG, verdict=FAILED, first=None, text="rank 0 failed: RuntimeError: x\nits log: a")
    assert failed.same_fault(replace(failed, text="rank 1 failed: RuntimeError: x\nits log: b"))
    assert not failed.same_fault(replace(failed, text="rank 0 failed: RuntimeError: y"))
