# SPDX-License-Identifier: Apache-2.0
"""A run that goes on in other layouts has the ledger of the run that nothing interrupted, and says which it had."""

import json
from itertools import pairwise

import pytest

from tests.distributed.small_models import MUON, small
from tests.ledgers import steps

# In `make test`: test_resume.py, from two ranks to one.
pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
DENSE = "qwen3_toy seq=32 gbs=4 model.num_layers=4 numerics.data_shards=2"
EXPERTS = small("qwen3_moe_toy")
SHARDED = f"{EXPERTS} gbs=4 numerics.data_shards=4"
SGD = "qwen3_toy seq=32 model.num_layers=1 optimizer.optimizer=sgd"
UNEVEN = "model.num_layers_in_first_pipeline_stage=1"
# The first layer is dense, so that the first stage of two has no experts.
DENSE_FIRST = f"{small('deepseek_v3_toy')} gbs=2 numerics.virtual_shards=4"

# A run, the layout in which it begins, and those in which it goes on after steps 2 and 4.
ROWS = (
    (f"{DENSE} {DISTRIBUTED}", "dp=2 tp=2", "dp=1 pp=2 tp=1", "dp=2 tp=1 pp=2"),
    (f"{DENSE} {DISTRIBUTED}", "dp=2 tp=2", "dp=2 tp=4 pp=1", f"dp=1 tp=2 pp=2 {UNEVEN}"),
    (f"{DENSE} {DISTRIBUTED}", "dp=2 tp=2", "dp=1", "dp=2 tp=1 pp=4"),
    (f"{DENSE} {DISTRIBUTED}", "dp=2 tp=2", "dp=1 tp=1 pp=4", "dp=2 tp=2 pp=1"),
    (f"qwen3_toy seq=64 gbs=2 numerics.context_shards=2 {DISTRIBUTED}", "cp=2", "cp=1 tp=2", "cp=2 tp=2"),
    (f"qwen3_toy seq=64 gbs=8 numerics.data_shards=4 {DISTRIBUTED}", "dp=4", "dp=2", "dp=4"),
    (SGD, "tp=2", "tp=1"),
    # Bridge looks for the random states of as many ranks as there are, and finds those of as many as there were.
    (f"{EXPERTS} gbs=2 {DISTRIBUTED}", "dp=2 tp=2", "tp=2 pp=2 ep=2"),
    (f"{EXPERTS} {DISTRIBUTED}", "tp=2 ep=2", "tp=1 ep=1", "tp=2 ep=2"),
    (EXPERTS, "tp=2 ep=2", "tp=1 ep=1", "tp=2 ep=2"),
    (SHARDED, "tp=2 ep=1", "ep=2"),
    (SHARDED, "tp=2 ep=2", "ep=1"),
    (SHARDED, "dp=4 ep=2", "dp=2"),
    (DENSE_FIRST, "pp=2", "pp=2"),
    (DENSE_FIRST, "tp=2", "pp=2 tp=1", "pp=2 dp=1"),
    (f"{DENSE_FIRST} {DISTRIBUTED}", "pp=2", "pp=2", "pp=1 tp=2"),
    (f"{DENSE_FIRST} precision=fp32", "pp=2", "pp=2", "pp=1"),
    (f"{DENSE_FIRST} {MUON}", "pp=2", "pp=2", "pp=1"),
    (f"{DENSE_FIRST} numerics=stock numerics.virtual_shards=null", "pp=2 ep=2 dp=2", "pp=2"),
)


def _train(tpi, *words: str) -> None:
    tpi("train", *" ".join(words).split(), "iters=6", "save=2", "run.dir=run", status=0)


def _resume(tpi, step: int, layout: str, status: int = 0):
    return tpi("train", "--resume", "run", *layout.split(), f"checkpoint.ckpt_step={step}", status=status)


@pytest.mark.parametrize("words, first, then", [(words, first, then) for words, first, *then in ROWS])
def test_a_run_that_goes_on_elsewhere_has_the_same_ledger(tpi, words, first, then):
    run = tpi.folder / "run"
    _train(tpi, words, first)
    whole = steps(run)
    for step, layout in zip((2, 4), then, strict=False):
        _resume(tpi, step, layout)
        assert steps(run) == whole, layout
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 2, 4][: 1 + len(then)]
    changes = [now["from_step"] for before, now in pairwise(attempts) if now["layout"] != before["layout"]]
    notes = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["notes"]
    assert [entry["after_step"] for entry in notes.get("resumed", ())] == changes
    for attempt, degrees in zip(attempts, (first, *then), strict=True):
        wanted = dict(word.split("=") for word in degrees.split())
        for name in attempt["layout"].keys() & wanted.keys():
            assert attempt["layout"][name] == int(wanted[name]), attempt
    if "dp=4" in then:
        assert "run: dp=4, from step 3 on dp=2, from step 5 on dp=4." in tpi("compare", "run", "run", status=0).stdout


@pytest.mark.parametrize("words, first, then", ((DENSE, "dp=2 tp=2", "tp=1 pp=2"), (SHARDED, "dp=4 ep=2", "dp=2")))
def test_stock_does_not(tpi, words, first, then):
    """The control: from the same checkpoint, the steps after it have other bits in another layout."""
    _train(tpi, words, "numerics=stock numerics.data_shards=null", first)
    whole = steps(tpi.folder / "run")
    _resume(tpi, 2, then)
    assert steps(tpi.folder / "run")[:2] == whole[:2]
    assert steps(tpi.folder / "run")[2:] != whole[2:]


def test_without_momentum_sgd_has_other_steps(tpi):
    _train(tpi, SGD)
    whole = steps(tpi.folder / "run")
    tpi("train", *SGD.split(), "iters=6", "optimizer.sgd_momentum=0", "run.dir=control", status=0)
    assert steps(tpi.folder / "control")[1:] != whole[1:]


# A run, and what another layout says of its checkpoint.
REFUSED = (
    (f"{DENSE} dp=2", "numerics.data_shards=4", "numerics.data_shards was 2 and is 4 now"),
    # Without the patches.
    (f"{SGD} tp=2 patches.off=[core-sgd-state]", "tp=2", "TypeError: 'NoneType' object is not callable"),
    (f"{DENSE_FIRST} pp=2 patches.off=[core-empty-optimizer]", "pp=2", "Cannot merge"),
)


@pytest.mark.parametrize("words, change, says", REFUSED)
def test_a_layout_that_would_change_bits_or_cannot_be_read_is_refused(tpi, words, change, says):
    _train(tpi, words)
    before = (tpi.folder / "run" / "ledger.jsonl").read_bytes()
    assert says in _resume(tpi, 2, change, status=2).stderr
    assert (tpi.folder / "run" / "ledger.jsonl").read_bytes() == before
