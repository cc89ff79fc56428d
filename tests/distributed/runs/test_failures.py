# SPDX-License-Identifier: Apache-2.0
"""What a user sees when a run cannot go on: one screen, exit status 2, and the name of what to look at."""

import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.faults import ranks_of
from tests.distributed.small_models import SAVED
from tp_invariant_recipes.errors import RunError

RUN = ("train", "qwen3_toy", "model.num_layers=1", "tp=2", "iters=400", "seq=32", "numerics=stock", "run.dir=run")


@pytest.mark.release
def test_a_killed_rank_is_named_with_its_log_and_takes_the_others_along(tpi):
    process = tpi.start(*RUN)
    ledger = tpi.folder / "run" / "ledger.jsonl"
    process.until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 2)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait() == 2
    assert "rank 1 was killed by SIGKILL" in process.stderr
    assert "run/logs/rank-1.log" in process.stderr
    assert "Traceback" not in process.stderr
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)


@pytest.mark.release
def test_a_training_whose_output_nobody_reads_goes_on_to_its_end(tpi):
    """As in `tpi train … 2>&1 | head -6`."""
    tpi("train", "qwen3_toy", "iters=6", "seq=64", "run.dir=run", before=_nobody_reads, status=0)
    assert len(tpi.ledger("run")) == 6
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][0]["outcome"] == "completed"


def _disconnect_long_before_the_end() -> None:
    """The other ranks notice this one's failure before its error has left Bridge."""
    from megatron.bridge.training import pretrain

    cleanup = pretrain._cleanup_after_pretrain_failure

    def slow(*args):
        cleanup(*args)
        time.sleep(1)

    pretrain._cleanup_after_pretrain_failure = slow


def _fail_on_rank_0() -> None:
    from tp_invariant_recipes.training import callbacks

    def fail(*_args, **_kwargs):
        _disconnect_long_before_the_end()
        raise RuntimeError("planted")

    callbacks.write_manifest = fail


def test_the_rank_that_failed_first_is_named_with_its_reason(tpi):
    failed = tpi(*RUN, "save=1", before=_fail_on_rank_0, status=2)
    assert "rank 0 failed: RuntimeError: planted" in failed.stderr
    assert "run/logs/rank-0.log" in failed.stderr
    assert "planted" in (tpi.folder / "run" / "logs" / "rank-0.log").read_text()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a few MiB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_reported_before_the_start(tpi, small_disk):
    (small_disk / "ballast").write_bytes(bytes(90 * 2**20))
    failed = tpi("train", "qwen3_toy", f"run.dir={small_disk}/run", status=2)
    assert "MiB free and this run writes at least" in failed.stderr
    assert not (small_disk / "run").exists()


@pytest.mark.release
def test_a_disk_that_fills_up_is_reported_at_the_end(tpi, small_disk):
    process = tpi.start("train", "qwen3_toy", "iters=4000", "seq=64", "numerics=stock", f"run.dir={small_disk}/run")
    ledger = small_disk / "run" / "ledger.jsonl"
    process.until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 2)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        for size in (2**16, 512, 1):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    assert process.wait() == 2
    assert "disk full: 0.0 MiB are free" in process.stderr
    assert "run.dir=PATH" in process.stderr
    listed = tpi("runs", str(small_disk)).stdout.splitlines()[1]
    assert listed.split()[1] == "failed"
    assert "disk full" in listed


NAN, INFINITY = float("nan"), float("inf")


def ended(norm, skipped=False):
    from tp_invariant_recipes.training.callbacks import Finite

    state = SimpleNamespace(train_state=SimpleNamespace(step=3))
    Finite().on_train_step_end(SimpleNamespace(grad_norm=norm, skipped_iter=skipped, state=state))


@pytest.mark.parametrize("norm", (NAN, INFINITY, torch.tensor(NAN)), ids=str)
def test_a_norm_that_is_no_number_ends_the_run(bridge, norm):
    with pytest.raises(RunError, match=r"the gradient norm of step 4 is (nan|inf); cuda_graph=off"):
        ended(norm)


@pytest.mark.parametrize("norm, skipped", ((0.0, False), (torch.tensor(1e30), False), (None, False), (INFINITY, True)))
def test_any_other_norm_does_not(bridge, norm, skipped):
    ended(norm, skipped)


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
