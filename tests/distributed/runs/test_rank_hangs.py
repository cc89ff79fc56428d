"""A rank of a real training that hangs is named, with its step and the line where it stands; a slow one is left alone.

tests/unit/launch/test_hang.py has the kinds of hanging, and ranks that are only slow.
"""

import time
from typing import Any

import pytest

from tests.distributed.faults import at_step

pytestmark = pytest.mark.release  # test_nodes.py has a training in which a rank hangs

RUN = (
    "train",
    "qwen3_toy",
    "tp=2",
    "iters=4",
    "seq=32",
    "gbs=2",
    "model.num_layers=1",
    "numerics=stock",
    "run.dir=run",
)


def sleep_for_ever(context: Any) -> None:
    """In Python, where a signal wakes no one."""
    while True:
        time.sleep(60)


def test_a_rank_that_sleeps_is_named_with_its_step_and_its_line(tpi):
    ended = tpi(*RUN, "run.hang_timeout=2", before=at_step(4, sleep_for_ever, ranks=(1,)), status=2)
    assert "error: rank 1 hangs: it has not ended step 4 for " in ended.stderr
    assert "rank 1 in step 4, at tests/distributed/runs/test_rank_hangs.py" in ended.stderr
    assert "rank 0 in step 4, waiting for reduce_scatter_tensor called at " in ended.stderr
    for rank in (0, 1):
        assert "(most recent call first)" in (tpi.folder / "run" / "logs" / f"rank-{rank}.log").read_text()


def _slowly() -> None:
    """Steps, evaluations and checkpoints that all take long, and longer than the limit together."""
    from megatron.bridge.training import checkpointing, train

    def slow(function, seconds):
        def slower(*args, **kwargs):
            time.sleep(seconds)
            return function(*args, **kwargs)

        return slower

    train.train_step = slow(train.train_step, 1.0)
    train.evaluate_and_print_results = slow(train.evaluate_and_print_results, 3.0)
    checkpointing.save_checkpoint = slow(checkpointing.save_checkpoint, 3.0)


def test_a_slow_training_goes_on(tpi):
    """The first two steps, which compile, may take longer too."""
    saving = ("save=3", "validation.eval_interval=3", "validation.eval_iters=1")
    tpi(*RUN, *saving, "run.hang_timeout=2", before=_slowly, status=0)
    assert len(tpi.ledger("run")) == 4
