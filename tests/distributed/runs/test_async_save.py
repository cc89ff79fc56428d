# SPDX-License-Identifier: Apache-2.0
"""checkpoint.async_save: a process beside each rank writes, and what it writes is trusted like any checkpoint."""

import json
import os
import shutil
import signal

import pytest

from tests.distributed.runs.test_resume import RUN, ended_with, reads_no_shard_back
from tests.ledgers import steps
from tp_invariant_recipes.runs import checkpoints

pytestmark = pytest.mark.release

ASYNC = (*RUN, "checkpoint.async_save=true", "checkpoint.async_strategy=mcore", "checkpoint.fully_parallel_save=true")


@pytest.fixture(scope="module")
def saved_beside(shared):
    """The whole run, saved by a process beside each rank. No rank reads a shard back to hash it."""
    shared(*ASYNC, "run.dir=async", before=reads_no_shard_back, status=0)
    return shared.folder / "async"


def test_the_ledger_and_the_files_are_those_of_a_run_whose_ranks_save(whole, saved_beside):
    """Digests of the optimizer's state too, which are those of the steps that are saved."""
    assert steps(saved_beside) == steps(whole)
    saved = checkpoints.finished(saved_beside / "checkpoints")
    assert [item.step for item in saved] == [2, 4]
    for each in saved:
        each.verify()
        manifest = each.read_manifest()
        assert manifest.step == each.step  # though the ranks are further when they write it
        assert {"__0_0.distcp", "__1_0.distcp"} <= set(manifest.files)


def test_a_save_holds_the_state_of_its_own_step(whole, saved_beside, tpi):
    shutil.copytree(saved_beside, tpi.folder / "run")
    tpi("train", "--resume", "run", "checkpoint.ckpt_step=2", status=0)
    assert steps(tpi.folder / "run") == steps(whole)


def _once_scheduled(step: int, what):
    """Call what(the writer's process) on rank 0 when its writer has been given the checkpoint of a step."""

    def plant() -> None:
        from megatron.bridge.training import checkpointing
        from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

        original = checkpointing.schedule_async_save

        def scheduling(state, request):
            original(state, request)
            if state.train_state.step == step and os.environ["RANK"] == "0":
                what(PersistentAsyncCaller._persistent_process)

        checkpointing.schedule_async_save = scheduling

    return plant


def _kill_launcher(_writer) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def test_a_killed_run_leaves_no_manifest_and_no_process(whole, tpi):
    mark = f"TPI_TEST_MARK={tpi.folder}"

    def plant() -> None:
        os.environ.update([mark.split("=", 1)])
        _once_scheduled(4, _kill_launcher)()

    assert tpi(*ASYNC, "run.dir=run", before=plant).status == -signal.SIGKILL
    ended_with(mark)
    assert 4 not in [item.step for item in checkpoints.finished(tpi.folder / "run" / "checkpoints")]
    tpi("train", "--resume", "run", status=0)
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][1]["from_step"] in (0, 2)
    assert steps(tpi.folder / "run") == steps(whole)


def test_a_run_ends_with_its_writer(tpi):
    """Megatron would wait for it for ever."""
    failed = tpi(*ASYNC, "run.dir=run", before=_once_scheduled(2, lambda writer: writer.kill()), status=2)
    assert "the process that writes checkpoints ended with status -9" in failed.stderr
    assert 2 not in [item.step for item in checkpoints.finished(tpi.folder / "run" / "checkpoints")]
