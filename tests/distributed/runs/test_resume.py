# SPDX-License-Identifier: Apache-2.0
"""A run that was killed or stopped and goes on has the ledger of the run that was not."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.faults import at_step, reached, wait_for_ever, wait_for_sigterm
from tests.distributed.small_models import SAVED
from tests.ledgers import agree, steps
from tp_invariant_recipes.runs import checkpoints

RUN = ("train", *SAVED)


def reads_no_shard_back() -> None:
    """Have a rank fail where it reads a shard to hash it: it hashes them as it writes them."""
    digest = checkpoints._digest

    def of_small_files(file: Path) -> str:
        assert file.suffix != ".distcp"
        return digest(file)

    checkpoints._digest = of_small_files


def _kill_when_saving(step: int, module: str, name: str):
    """Have a rank kill the launcher where `module.name` is called while the checkpoint of `step` is written.

    The ranks, this one included, must end by themselves.
    """

    def plant() -> None:
        import importlib

        holder = importlib.import_module(module)
        original = getattr(holder, name)

        def killing(*args, **kwargs):
            if f"iter_{step:07d}" in repr((args, kwargs)):
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()
            return original(*args, **kwargs)

        setattr(holder, name, killing)

    return plant


BRIDGE = "megatron.bridge.training.checkpointing"
# Where the run is killed, and the step it can go on from. The first, which leaves most behind, stands for all in
# `make test`.
KILLS = {
    "after Bridge's marker": (_kill_when_saving(4, "tp_invariant_recipes.training.callbacks", "write_manifest"), 2),
    "before anything is written": (_kill_when_saving(4, BRIDGE, "ensure_directory_exists"), 2),
    "before Bridge's marker": (_kill_when_saving(4, BRIDGE, "get_checkpoint_run_config_filename"), 2),
    "in the first save": (_kill_when_saving(2, "tp_invariant_recipes.training.callbacks", "write_manifest"), 0),
}
FIRST, *OTHERS = KILLS


@pytest.mark.parametrize("where", (FIRST, *(pytest.param(where, marks=pytest.mark.release) for where in OTHERS)))
def test_killed_while_saving(whole, tpi, where):
    """No helper that saving started outlives the run, and the run can go on."""
    kill, start = KILLS[where]
    mark = f"TPI_TEST_MARK={tpi.folder}"

    def plant() -> None:
        os.environ.update([mark.split("=", 1)])
        reads_no_shard_back()
        kill()

    killed = tpi(*RUN, "run.dir=run", before=plant)
    assert killed.status == -signal.SIGKILL, killed.stderr
    ended_with(mark)
    saved = checkpoints.finished(tpi.folder / "run" / "checkpoints")
    assert [checkpoint.step for checkpoint in saved] == [2][: start // 2]
    for checkpoint in saved:
        checkpoint.verify()
    tpi("train", "--resume", "run", status=0)
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][1]["from_step"] == start
    assert steps(tpi.folder / "run") == steps(whole)
    assert (tpi.folder / "run" / "ledger.replaced-1.jsonl").exists()


def ended_with(mark: str) -> None:
    """Wait until no process has this NAME=VALUE in its environment."""

    def remaining() -> list[str]:
        results = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark.encode() in environ.read_bytes():
                    results.append(environ.parent.name)
            except OSError:
                continue
        return results

    deadline = time.monotonic() + 30
    while (processes := remaining()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes == []


@pytest.mark.parametrize(
    "number, status",
    ((signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.release)),
    ids=lambda item: getattr(item, "name", ""),
)
def test_a_signal_saves_and_the_run_goes_on(whole, tpi, number, status):
    process = tpi.start(*RUN, "save=0", "run.dir=run", before=at_step(3, wait_for_sigterm))
    process.until(reached(tpi.folder, 3))
    os.kill(process.pid, number)
    assert process.wait() == status, process.stderr
    assert "tpi train --resume run" in process.stderr
    saved = checkpoints.finished(tpi.folder / "run" / "checkpoints")
    assert [c.step for c in saved] == [len(tpi.ledger("run"))] == [3]
    tpi("train", "--resume", "run", status=0)
    assert agree(steps(tpi.folder / "run"), steps(whole))
    tpi("compare", "run", whole, status=0)


@pytest.fixture
def copied(whole, tpi):
    """A copy of the whole run, to be damaged."""
    shutil.copytree(whole, tpi.folder / "run")
    return tpi


LONGER = ("iters=6", "scheduler.lr_decay_iters=4")


@pytest.mark.release
def test_a_resumed_run_may_be_longer_but_not_another(whole, copied):
    longer = copied("train", "--resume", "run", "iters=6", status=2)
    assert "scheduler.lr_decay_iters was 4 and is 6 now; set scheduler.lr_decay_iters=4" in longer.stderr
    other = copied("train", "--resume", "run", "lr=1e-3", "seed=3", status=2)
    assert "optimizer.lr was 0.003" in other.stderr
    assert "rng.seed was 1234" in other.stderr
    copied("train", "--resume", "run", *LONGER, status=0)
    assert steps(copied.folder / "run")[:4] == steps(whole)
    assert len(copied.ledger("run")) == 6


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def test_a_completed_run_stays_unchanged(copied):
    before = _files(copied.folder / "run")
    for words in (
        ("train", "--resume", "run"),
        ("train", "--resume", "run", "--dry-run"),
        (*RUN, "run.dir=run", "--continue", "--json"),
    ):
        message = copied(*words, status=0)
        text = message.stdout + message.stderr
        assert "run completed at step 4 of 4: no step is left to train. iters=N goes on at step 4: tpi" in text
        assert "tpi train --resume run iters=N scheduler.lr_decay_iters=4" in text
    assert json.loads(message.stdout)["outcome"] == "completed"
    assert _files(copied.folder / "run") == before


def _shuffle_otherwise(run: Path) -> None:
    """Exchange samples of the steps after the second."""
    import numpy

    (file,) = (run / "index-cache").glob("*-train-shuffle_index.npy")
    index = numpy.load(file)
    index[2:4] = index[2:4][::-1]
    numpy.save(file, index)


FROM_STEP_2 = ("train", "--resume", "run", "checkpoint.ckpt_step=2")


@pytest.mark.release
def test_a_damaged_index_is_rebuilt(copied, whole):
    _shuffle_otherwise(copied.folder / "run")
    copied(*FROM_STEP_2, status=0)
    assert steps(copied.folder / "run") == steps(whole)
    log = (copied.folder / "run" / "logs" / "rank-0.log").read_text()
    assert re.search(r"train-shuffle_index\.npy: torn, changed, or not recorded: it is built again", log)


@pytest.mark.release
def test_a_key_for_the_start_does_not_count_when_the_run_continues(whole, tpi):
    """A scheduler repeats the command that began the run."""
    command = (*RUN, "run.dir=run", "--continue", "checkpoint.finetune=true", "checkpoint.load_optim=false")
    process = tpi.start(*command, before=at_step(4, wait_for_ever))
    process.until(reached(tpi.folder, 4))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    tpi(*command, status=0)
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][1]["from_step"] == 2
    assert steps(tpi.folder / "run") == steps(whole)


@pytest.mark.release
def test_a_checkpoint_that_bridge_does_not_find_is_not_begun_without(copied):
    """Bridge would begin at step 0, with new weights."""
    folder = copied.folder / "run" / "checkpoints"
    for tracker in folder.glob("latest*"):
        tracker.unlink()
    before = (copied.folder / "run" / "ledger.jsonl").read_bytes()
    refused = copied(*FROM_STEP_2, status=2)
    assert "error: Megatron-Bridge begins at step 0, not at step 2 of run/checkpoints" in refused.stderr
    assert (copied.folder / "run" / "ledger.jsonl").read_bytes() == before
    source, target = re.search(r"; cp (\S+) (\S+)", refused.stderr).groups()
    shutil.copy(copied.folder / source, copied.folder / target)
    copied(*FROM_STEP_2, status=0)


@pytest.mark.release
def test_a_foreign_checkpoint_is_refused(copied):
    copied(*RUN, "save=4", "seed=9", "run.dir=other", status=0)
    newest = copied.folder / "run" / "checkpoints" / "iter_0000004"
    shutil.rmtree(newest)
    shutil.copytree(copied.folder / "other" / "checkpoints" / newest.name, newest)
    refused = copied("train", "--resume", "run", *LONGER, status=2)
    assert "iter_0000004 belongs to another run" in refused.stderr


def _flip_as_loaded(kind: str):
    """Flip the lowest bit of one element of what the last rank has loaded, before it is compared."""

    def plant() -> None:
        import torch

        from tp_invariant_recipes.observe.digests.callback import Digests
        from tp_invariant_recipes.observe.optimizer_state import OptimizerState

        original = Digests.on_train_start

        def on_train_start(self, context):
            if os.environ["RANK"] == "1":
                slot = OptimizerState(context.optimizer).slots[0]
                values = {"masters": slot.updated, "weights": slot.owner}.get(kind)
                values = slot.state["exp_avg"] if values is None else values
                values.data.view(torch.int16).flatten()[0] ^= 1
            original(self, context)

        Digests.on_train_start = on_train_start

    return plant


@pytest.mark.parametrize(
    "kind", ("moments", *(pytest.param(k, marks=pytest.mark.release) for k in ("masters", "weights")))
)
def test_a_state_that_is_not_the_ledgers_is_refused(copied, kind):
    before = (copied.folder / "run" / "ledger.jsonl").read_bytes()
    refused = copied("train", "--resume", "run", "checkpoint.ckpt_step=2", before=_flip_as_loaded(kind), status=2)
    assert "the state loaded for step 2 is not the one that the ledger has of it" in refused.stderr
    assert re.search(rf"{kind}/\S+.* differ", refused.stderr)
    assert "checkpoint.ckpt_step=STEP" in refused.stderr
    assert (copied.folder / "run" / "ledger.jsonl").read_bytes() == before


def test_another_layout_can_go_on(copied):
    """The checkpoint is resharded; the steps before stay as they were, and the ledger says that the layout changed."""
    copied("train", "--resume", "run", "tp=1", "checkpoint.ckpt_step=2", status=0)
    header = json.loads((copied.folder / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert header["notes"]["resumed"][0]["after_step"] == 2
    assert header["notes"]["resumed"][0]["changed"]["layout.tp"] == 1
    log = (copied.folder / "run" / "logs" / "rank-0.log").read_text()
    assert "step 2 as loaded: master weights, optimizer moments equal to the ledger" in log
