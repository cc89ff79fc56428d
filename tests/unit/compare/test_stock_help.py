"""What `tpi compare`, `verify` and `bisect` say of two stock runs that differ."""

from dataclasses import replace

import pytest

from tests.unit.compare.ledgers import HEADER, A, ledger
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.compare.stock_help import stock_help, weights_drawn
from tp_invariant_recipes.compare.text import remarks
from tp_invariant_recipes.ledger.bits import float_bits

LAYOUT = {"cp": 1, "dp": 1, "ep": 1, "etp": 1, "pp": 1, "sp": False, "tp": 1}


def run(name: str, tp: int, loss: float, **numerics: str):
    header = replace(
        HEADER, layout=LAYOUT | {"tp": tp}, numerics={"mode": "stock", "initial_weights": "invariant"} | numerics
    )
    steps = [replace(step, loss=float_bits(loss, 64)) for step in A.steps]
    return replace(ledger(name, header=header), steps=steps)


@pytest.mark.parametrize(
    "loss, message", ((6.001, "no more than rounding in bf16 does"), (6.1, "more than rounding does"))
)
def test_two_layouts_from_one_start_are_measured_and_the_audit_is_named(loss, message):
    compared = compare(run("a", 1, 6.0), run("b", 2, loss))
    text = remarks(compared)[-1]
    assert text.startswith("help: numerics=stock adds in another order in every layout (tp=1 and tp=2)")
    assert f"relatively in loss by {abs(loss - 6) / 6:.1e}" in text
    assert message in text
    assert text.endswith("tpi audit MODEL tp=2")
    assert weights_drawn(compared) is None


def test_weights_that_are_drawn_are_named_with_their_key():
    compared = compare(
        *(run(name, tp, loss, initial_weights="megatron") for name, tp, loss in (("a", 1, 6), ("b", 2, 7)))
    )
    assert "numerics.initial_weights=invariant" in str(weights_drawn(compared))
    assert weights_drawn(compared) in stock_help(compared)
    assert not any("rounding in bf16" in sentence for sentence in stock_help(compared))


def test_nothing_is_reported_of_other_numerics_one_layout_or_equal_runs():
    for a, b in (
        (run("a", 1, 6.0, mode="tree"), run("b", 2, 6.1, mode="tree")),
        (run("a", 2, 6.0), run("b", 2, 6.1)),
        (run("a", 1, 6.0), run("b", 2, 6.0)),
    ):
        assert stock_help(compare(a, b)) == ()
    assert weights_drawn(compare(run("a", 1, 6.0, mode="tree"), run("b", 2, 6.1, mode="tree"))) is None
