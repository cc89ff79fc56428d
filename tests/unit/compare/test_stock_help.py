"""Two layouts of stock numerics that differ: one sentence names the page."""

from dataclasses import replace

import pytest

from tests.unit.compare.ledgers import HEADER, A, ledger
from tp_invariant_recipes.compare.compare import compare
from tp_invariant_recipes.compare.text import remarks
from tp_invariant_recipes.ledger.bits import float_bits


def run(name: str, tp: int, loss: float, mode: str):
    header = replace(HEADER, layout={"tp": tp}, numerics={"mode": mode})
    return replace(ledger(name, header=header), steps=[replace(step, loss=float_bits(loss, 64)) for step in A.steps])


# Mode, tp and loss of two runs; whether the page is named.
ROWS = (
    ("stock", (1, 6.0), (2, 6.1), True),
    ("tree", (1, 6.0), (2, 6.1), False),
    ("stock", (2, 6.0), (2, 6.1), False),
    ("stock", (1, 6.0), (2, 6.0), False),
)


@pytest.mark.parametrize("mode, a, b, named", ROWS)
def test_the_page_is_named_where_two_stock_layouts_differ(mode, a, b, named):
    assert ("docs/audit.md" in remarks(compare(run("a", *a, mode), run("b", *b, mode)))[-1]) is named
