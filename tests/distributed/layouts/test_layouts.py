# SPDX-License-Identifier: Apache-2.0
"""One ledger for every layout, end to end; with stock numerics, from equal weights, two.

The rows are in rows.py. `make test` has the dense model of test_invariance.py and few rows beside it.
"""

import pytest

from tests.distributed.layouts.rows import GRADS, OPTIM, PARAMS, ROWS, SHORT, STOCK_ROWS, STOCK_SHORT
from tests.distributed.scenario import agree, stock_differs
from tests.distributed.small_models import SHORTEST
from tp_invariant_recipes.numerics.precision import DEFINITION, MXFP8

pytestmark = [pytest.mark.timeout(2400), pytest.mark.usefixtures("families")]


def _all(short, others):
    return [*short.items(), *(pytest.param(*row, marks=pytest.mark.release) for row in others.items())]


@pytest.mark.parametrize("words, layouts", _all(SHORT, ROWS))
def test_one_ledger_for_all_layouts(request, scenario, words, layouts):
    if "numerics=portable" in words:
        request.getfixturevalue("portable_loops")
    agree(scenario(words), layouts)
    first = scenario(words, layouts[0])
    in_fp8 = "fp8_" in words or "mxfp8" in words
    assert first.header().device.get("fp8") == ((MXFP8 if "mxfp8" in words else DEFINITION) if in_fp8 else None)
    if "optimizer=muon" in words:
        moments = {name.partition("/")[0] for name in first.ledger()[-1].moments}
        assert moments == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("words, layouts", _all(STOCK_SHORT, STOCK_ROWS))
def test_stock_has_two(scenario, words, layouts):
    assert "different at step 1" in stock_differs(scenario(words), layouts)


def _added_as_they_come():
    from tp_invariant_recipes.numerics.sums.data_shards import ShardCounter

    ShardCounter._switch = lambda *unused: None


@pytest.mark.parametrize("fsdp", (PARAMS, *(pytest.param(fsdp, marks=pytest.mark.release) for fsdp in (OPTIM, GRADS))))
def test_passes_of_fsdp_that_are_added_as_they_come_differ(scenario, fsdp):
    run = scenario(f"{SHORTEST} gbs=8 numerics.data_shards=8 dp=2 {fsdp}")
    assert "different at step 1" in run.compared(run.planted(_added_as_they_come), status=1).stdout
