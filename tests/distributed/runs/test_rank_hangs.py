"""A real training whose steps, evaluations and checkpoints are slow is not taken for one that hangs.

tests/unit/launch/test_hang.py has the kinds of hanging, and test_nodes.py a training in which a rank hangs.
"""

import time

import pytest

from tests.distributed.small_models import SAVED


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


@pytest.mark.release
def test_a_slow_training_goes_on(tpi):
    """The set-up has the same limit."""
    saving = ("save=3", "validation.eval_interval=3", "validation.eval_iters=1", "run.dir=run")
    tpi("train", *SAVED, *saving, "run.hang_timeout=15", before=_slowly, status=0)
    assert len(tpi.ledger("run")) == 4
