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
from tests.ledgers import agree, steps
from tp_invariant_recipes.runs import checkpoints

TOY = ("qwen3_toy", "model.num_layers=1", "tp=2", "seq=32", "gbs=1", "numerics=stock")
RUN = ("train", *TOY, "iters=12", "save=4")


def _reads_no_shard_back() -> None:
    """Have a rank fail where it reads a shard to hash it: it hashes them as it writes them."""
    digest = checkpoints._digest

    def of_small_files(file: Path) -> str:
        assert file.suffix != ".distcp"
        return digest(file)

    checkpoints._digest = of_small_files


@pytest.fixture(scope="module")
def whole(shared):
    """The uninterrupted run."""
    shared(*RUN, "run.dir=whole", before=_reads_no_shard_back, status=0)
    for checkpoint in checkpoints.finished(shared.folder / "whole" / "checkpoints"):
        checkpoint.verify()
    return shared


def _kill_everything(*_args, **_kwargs) -> None:
    """SIGKILL for the launcher; its ranks, this one included, must follow by themselves."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def _when_saving_step(step: int, module: str, name: str):
    """Have a rank kill the run where `module.name` is called while the checkpoint of `step` is written."""

    def plant() -> None:
        import importlib

        holder = importlib.import_module(module)
        original = getattr(holder, name)

        def killing(*args, **kwargs):
            if f"iter_{step:07d}" in repr((args, kwargs)):
                _kill_everything()
            return original(*args, **kwargs)

        setattr(holder, name, killing)

    return plant


# Where the run is killed, and the step it can go on from.
KILLS = {
    "before anything of the checkpoint is written": (
        _when_saving_step(8, "megatron.bridge.training.checkpointing", "ensure_directory_exists"),
        4,
    ),
    "after the shards, before Bridge's marker": (
        _when_saving_step(8, "megatron.bridge.training.checkpointing", "get_checkpoint_run_config_filename"),
        4,
    ),
    "after Bridge's marker, before the manifest": (
        _when_saving_step(8, "tp_invariant_recipes.training.callbacks", "write_manifest"),
        4,
    ),
    "during the first save of all": (
        _when_saving_step(4, "tp_invariant_recipes.training.callbacks", "write_manifest"),
        0,
    ),
}


# The one that leaves most behind stands for all in `make test`.
SHORT = ("after Bridge's marker, before the manifest",)


@pytest.mark.parametrize(
    "where", tuple(pytest.param(where, marks=() if where in SHORT else pytest.mark.release) for where in KILLS)
)
def test_killed_while_saving(whole, tpi, where):
    """No helper that saving started outlives the run, and the run can go on."""
    kill, start = KILLS[where]
    mark = f"TPI_TEST_MARK={tpi.folder}"

    def plant() -> None:
        os.environ.update([mark.split("=", 1)])
        kill()

    killed = tpi(*RUN, "run.dir=run", before=plant)
    assert killed.status == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while (remaining := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remaining == []
    assert len(tpi.ledger("run")) < 12
    tpi("train", "--resume", "run", status=0)
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][1]["from_step"] == start
    assert steps(tpi.folder / "run") == steps(whole.folder / "whole")
    assert (tpi.folder / "run" / "ledger.replaced-1.jsonl").exists()


def _processes_with(mark: str) -> list[str]:
    results = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                results.append(environ.parent.name)
        except OSError:
            continue
    return results


@pytest.mark.parametrize(
    "number, status",
    ((signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.release)),
    ids=lambda item: getattr(item, "name", ""),
)
def test_a_signal_saves_and_the_run_goes_on(whole, tpi, number, status):
    process = tpi.start(*RUN, "save=0", "run.dir=run", before=at_step(5, wait_for_sigterm))
    process.until(reached(tpi.folder, 5))
    os.kill(process.pid, number)
    assert process.wait() == status, process.stderr
    assert "tpi train --resume run" in process.stderr
    saved = checkpoints.finished(tpi.folder / "run" / "checkpoints")
    assert [c.step for c in saved] == [len(tpi.ledger("run"))] == [5]
    tpi("train", "--resume", "run", status=0)
    assert agree(steps(tpi.folder / "run"), steps(whole.folder / "whole"))
    tpi("compare", "run", whole.folder / "whole", status=0)


@pytest.mark.release
def test_a_resumed_run_may_be_longer_but_not_another(whole, tpi):
    shutil.copytree(whole.folder / "whole", tpi.folder / "run")
    longer = tpi("train", "--resume", "run", "iters=14", status=2)
    assert "scheduler.lr_decay_iters was 12 and is 14 now; set scheduler.lr_decay_iters=12" in longer.stderr
    other = tpi("train", "--resume", "run", "lr=1e-3", "seed=3", status=2)
    assert "optimizer.lr was 0.003" in other.stderr
    assert "rng.seed was 1234" in other.stderr
    tpi("train", "--resume", "run", "iters=14", "scheduler.lr_decay_iters=12", status=0)
    assert steps(tpi.folder / "run")[:12] == steps(whole.folder / "whole")[:12]
    assert len(tpi.ledger("run")) == 14


@pytest.fixture
def copied(whole, tpi):
    """A copy of the whole run, to be damaged."""
    shutil.copytree(whole.folder / "whole", tpi.folder / "run")
    return tpi


def _flip(file) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


LONGER = ("iters=14", "scheduler.lr_decay_iters=12")


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("command", (("train", "--resume", "run"), (*RUN, "run.dir=run", "--continue")), ids=" ".join)
def test_a_completed_run_stays_unchanged(copied, command):
    before = _files(copied.folder / "run")
    for options in ((), ("--dry-run",), ("--json",)):
        message = copied(*command, *options, status=0)
        text = message.stdout + message.stderr
        assert "run completed at step 12 of 12: no step is left to train. iters=N goes on at step 12: tpi" in text
        assert "tpi train --resume run iters=N scheduler.lr_decay_iters=12" in text
    assert json.loads(message.stdout)["outcome"] == "completed"
    assert _files(copied.folder / "run") == before


def _shuffle_otherwise(run: Path) -> None:
    """Exchange samples of the steps after the eighth."""
    import numpy

    (file,) = (run / "index-cache").glob("*-train-shuffle_index.npy")
    index = numpy.load(file)
    index[8:12] = index[8:12][::-1]
    numpy.save(file, index)


def _tear(run: Path) -> None:
    """As a kill does while Megatron writes the index: no manifest is there yet."""
    (file,) = (run / "index-cache").glob("*-train-shuffle_index.npy")
    os.truncate(file, file.stat().st_size // 2)
    (run / "index-cache" / checkpoints.MANIFEST).unlink()


FROM_STEP_8 = ("train", "--resume", "run", "checkpoint.ckpt_step=8")


@pytest.mark.release
@pytest.mark.parametrize("damage", (_shuffle_otherwise, _tear))
def test_a_damaged_index_is_rebuilt(copied, whole, damage):
    damage(copied.folder / "run")
    copied(*FROM_STEP_8, status=0)
    assert steps(copied.folder / "run") == steps(whole.folder / "whole")
    log = (copied.folder / "run" / "logs" / "rank-0.log").read_text()
    assert re.search(r"train-shuffle_index\.npy: torn, changed, or not recorded: it is built again", log)


@pytest.mark.release
def test_without_the_manifest_another_index_trains_on_other_samples(copied, whole):
    def plant() -> None:
        from tp_invariant_recipes.runs import index_cache

        index_cache.remove_unrecorded = lambda cache: []
        index_cache.record = lambda cache: None

    _shuffle_otherwise(copied.folder / "run")
    copied(*FROM_STEP_8, before=plant, status=0)
    assert steps(copied.folder / "run")[:8] == steps(whole.folder / "whole")[:8]
    assert steps(copied.folder / "run")[8:] != steps(whole.folder / "whole")[8:]


@pytest.mark.release
def test_a_key_for_the_start_does_not_count_when_the_run_continues(whole, tpi):
    """A scheduler repeats the command that began the run."""
    command = (*RUN, "run.dir=run", "--continue", "checkpoint.finetune=true", "checkpoint.load_optim=false")
    process = tpi.start(*command, before=at_step(8, wait_for_ever))
    process.until(reached(tpi.folder, 8))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    tpi(*command, status=0)
    assert json.loads((tpi.folder / "run" / "run.json").read_text())["attempts"][1]["from_step"] == 4
    assert steps(tpi.folder / "run") == steps(whole.folder / "whole")


DAMAGE = {
    "has changed since it was written": _flip,
    "is missing": lambda file: file.unlink(),
    "bytes instead of": lambda file: os.truncate(file, file.stat().st_size - 1),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(copied, words):
    newest = checkpoints.finished(copied.folder / "run" / "checkpoints")[-1].path
    DAMAGE[words](newest / "__1_0.distcp")
    refused = copied("train", "--resume", "run", *LONGER, status=2)
    assert f"{newest.name} is damaged" in refused.stderr
    assert re.search(rf"__1_0\.distcp .*{words}", refused.stderr)


@pytest.mark.release
def test_an_earlier_checkpoint_than_a_damaged_one_can_be_gone_on_with(copied):
    _flip(checkpoints.finished(copied.folder / "run" / "checkpoints")[-1].path / "__1_0.distcp")
    assert copied("train", "--resume", "run", *LONGER).status == 2
    copied("train", "--resume", "run", "checkpoint.ckpt_step=8", status=0)


@pytest.mark.release
def test_a_checkpoint_that_bridge_does_not_find_is_not_begun_without(copied):
    """Bridge would begin at step 0, with new weights."""
    folder = copied.folder / "run" / "checkpoints"
    for tracker in folder.glob("latest*"):
        tracker.unlink()
    before = (copied.folder / "run" / "ledger.jsonl").read_bytes()
    refused = copied(*FROM_STEP_8, status=2)
    assert "error: Megatron-Bridge begins at step 0, not at step 8 of run/checkpoints" in refused.stderr
    assert (copied.folder / "run" / "ledger.jsonl").read_bytes() == before
    source, target = re.search(r"; cp (\S+) (\S+)", refused.stderr).groups()
    shutil.copy(copied.folder / source, copied.folder / target)
    copied(*FROM_STEP_8, status=0)


@pytest.mark.release
def test_a_foreign_checkpoint_is_refused(copied, tmp_path):
    copied(*RUN, "save=12", "seed=9", "run.dir=other", status=0)
    newest = copied.folder / "run" / "checkpoints" / "iter_0000012"
    shutil.rmtree(newest)
    shutil.copytree(copied.folder / "other" / "checkpoints" / "iter_0000012", newest)
    refused = copied("train", "--resume", "run", *LONGER, status=2)
    assert "iter_0000012 belongs to another run" in refused.stderr


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
    refused = copied("train", "--resume", "run", "checkpoint.ckpt_step=8", before=_flip_as_loaded(kind), status=2)
    assert "the state loaded for step 8 is not the one that the ledger has of it" in refused.stderr
    assert re.search(rf"{kind}/\S+.* differ", refused.stderr)
    assert "checkpoint.ckpt_step=STEP" in refused.stderr
    assert (copied.folder / "run" / "ledger.jsonl").read_bytes() == before


def test_another_layout_can_go_on(copied):
    """The checkpoint is resharded; the steps before stay as they were, and the ledger says that the layout changed."""
    copied("train", "--resume", "run", "tp=1", "checkpoint.ckpt_step=8", status=0)
    header = json.loads((copied.folder / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert header["notes"]["resumed"][0]["after_step"] == 8
    assert header["notes"]["resumed"][0]["changed"]["layout.tp"] == 1
    log = (copied.folder / "run" / "logs" / "rank-0.log").read_text()
    assert "step 8 as loaded: master weights, optimizer moments equal to the ledger" in log
