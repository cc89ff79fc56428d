"""A run that goes on in other layouts has the ledger of the run that nothing interrupted, and says which it had."""

import json
import os
import signal

import pytest

from tests.distributed.faults import at_step, reached, wait_for_ever
from tests.ledgers import agree, steps

RUN = ("train", "qwen3_toy", "dp=2", "iters=6", "save=2", "seq=32", "gbs=4", "model.num_layers=4")
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
FIRST = ("tp=2", DISTRIBUTED)  # in which the run begins
# After step 2, and after step 4.
NEXT = ("dp=1 pp=2 tp=1", "dp=2 tp=1 pp=2")
LONGER = (
    ("dp=2 tp=4 pp=1", "dp=1 tp=2 pp=2 model.num_layers_in_first_pipeline_stage=1"),
    ("dp=1", "dp=2 tp=1 pp=4"),
    ("dp=1 tp=1 pp=4", "dp=2 tp=2 pp=1"),
)


@pytest.fixture(scope="module")
def whole(shared):
    """The run that nothing interrupts, in a layout of its own."""
    shared(*RUN, "tp=1", "run.dir=whole", status=0)
    return shared


def _killed(tpi, step, *arguments):
    process = tpi.start(*arguments, before=at_step(step, wait_for_ever))
    process.until(reached(tpi.folder, step))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("second, third", (NEXT, *LONGER))
def test_a_run_that_is_killed_and_goes_on_elsewhere_has_the_same_ledger(whole, tpi, second, third):
    _killed(tpi, 4, *RUN, *FIRST, "run.dir=run")
    _killed(tpi, 6, "train", "--resume", "run", *second.split())
    tpi("train", "--resume", "run", *third.split(), status=0)
    assert steps(tpi.folder / "run") == steps(whole.folder / "whole")
    tpi("compare", "run", whole.folder / "whole", status=0)
    header = json.loads((tpi.folder / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert header["layout"]["tp"] == 2
    assert [entry["after_step"] for entry in header["notes"]["resumed"]] == [2, 4]
    attempts = json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 2, 4]
    wanted = [{"tp": 2, "dp": 2}, *(dict(word.split("=") for word in words.split()) for words in (second, third))]
    for attempt, degrees in zip(attempts, wanted, strict=True):
        for name in attempt["layout"].keys() & degrees.keys():
            assert attempt["layout"][name] == int(degrees[name]), attempt


@pytest.mark.release
@pytest.mark.timeout(900)
def test_context_parallel_ranks_come_and_go(tpi):
    words = ("train", "qwen3_toy", "iters=6", "save=2", "seq=64", "gbs=2", DISTRIBUTED)
    tpi(*words, "cp=1", "numerics.context_shards=2", "run.dir=whole", status=0)
    _killed(tpi, 4, *words, "cp=2", "run.dir=run")
    _killed(tpi, 6, "train", "--resume", "run", "cp=1", "tp=2")
    tpi("train", "--resume", "run", "cp=2", "tp=2", status=0)
    assert steps(tpi.folder / "run") == steps(tpi.folder / "whole")
    assert tpi("compare", "run", "whole").status == 0
    refused = tpi("train", "--resume", "run", "cp=4", "iters=8", status=2)
    assert "cp=4 does not divide numerics.context_shards=2" in refused.stderr


@pytest.mark.release
@pytest.mark.timeout(900)
def test_data_parallel_ranks_come_and_go(tpi):
    words = ("train", "qwen3_toy", "iters=6", "save=2", "seq=64", "gbs=8", DISTRIBUTED)
    tpi(*words, "dp=1", "numerics.data_shards=4", "run.dir=whole", status=0)
    _killed(tpi, 4, *words, "dp=4", "run.dir=run")
    _killed(tpi, 6, "train", "--resume", "run", "dp=2")
    tpi("train", "--resume", "run", "dp=4", status=0)
    assert steps(tpi.folder / "run") == steps(tpi.folder / "whole")
    compared = tpi("compare", "run", "whole", status=0)
    assert "run: dp=4, from step 3 on dp=2, from step 5 on dp=4." in compared.stdout


@pytest.mark.release
def test_stock_does_not(shared, tpi):
    """The control: from the same checkpoint, the steps after it have other bits in another layout."""
    tpi(*RUN, *FIRST, "numerics=stock", "run.dir=whole", status=0)
    _killed(tpi, 4, *RUN, *FIRST, "numerics=stock", "run.dir=run")
    tpi("train", "--resume", "run", "tp=1", "pp=2", status=0)
    first, other = (steps(tpi.folder / name) for name in ("whole", "run"))
    assert agree(first[:2], other[:2])
    assert not agree(first[2:], other[2:])


REFUSED = {
    "numerics.data_shards=4": "numerics.data_shards was 2 and is 4 now",
    "dp=4": "dp=4 does not divide numerics.data_shards=2",
    "optimizer.use_distributed_optimizer=true": "it holds the state of an optimizer that is not distributed",
}


@pytest.fixture(scope="module")
def short(shared):
    """A run of one layer with a checkpoint after each of its two steps."""
    shared(*RUN, "iters=2", "save=1", "model.num_layers=1", "run.dir=short", status=0)
    return shared


@pytest.mark.release
@pytest.mark.parametrize("change", REFUSED)
def test_a_layout_that_would_change_bits_or_cannot_be_read_is_refused(short, change):
    before = (short.folder / "short" / "ledger.jsonl").read_bytes()
    refused = short("train", "--resume", "short", change, "checkpoint.ckpt_step=1", status=2)
    assert REFUSED[change] in refused.stderr
    assert (short.folder / "short" / "ledger.jsonl").read_bytes() == before


@pytest.mark.release
def test_experts_go_on_wherever_they_are(shared, tpi):
    from tests.distributed.small_models import small

    words = ("train", *small("qwen3_moe_toy").split(), "gbs=2", "dp=2", "iters=4", "save=2", DISTRIBUTED)
    tpi(*words, "tp=2", "run.dir=run", status=0)
    before = steps(tpi.folder / "run")
    tpi("train", "--resume", "run", "tp=2", "pp=2", "ep=2", "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run") == before


SGD = ("train", "qwen3_toy", "iters=3", "save=1", "seq=32", "model.num_layers=1", "optimizer.optimizer=sgd", "tp=2")


@pytest.mark.release
def test_momentum_of_sgd_goes_on_in_another_layout(tpi):
    """The control goes on without it."""
    tpi(*SGD, "run.dir=run", status=0)
    whole = steps(tpi.folder / "run")
    tpi("train", "--resume", "run", "tp=1", "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run") == whole
    tpi(*SGD, "optimizer.sgd_momentum=0", "run.dir=control", status=0)
    assert steps(tpi.folder / "control")[1:] != whole[1:]


@pytest.mark.release
def test_without_the_patch_sgd_does_not_go_on(tpi):
    tpi(*SGD, "patches.off=[core-sgd-state]", "run.dir=run", status=0)
    ended = tpi("train", "--resume", "run", "checkpoint.ckpt_step=2", status=2)
    assert "TypeError: 'NoneType' object is not callable" in ended.stderr
