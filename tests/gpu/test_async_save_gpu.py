# SPDX-License-Identifier: Apache-2.0
"""On one GPU: checkpoints saved beside the steps are those of a synchronous run, are resumed from, and are checked."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.gpu.commands import steps, tpi
from tp_invariant_recipes.runs import checkpoints

pytestmark = pytest.mark.gpu

# A checkpoint large enough that the writer is still busy when the next steps are trained.
RUN = (
    "train", "qwen3_toy", "iters=12", "save=4", "gbs=2", "cuda_graph=off", "model.vocab_size=65536",
    "model.num_layers=8",
)  # fmt: skip
ASYNC = ("checkpoint.async_save=true", "checkpoint.async_strategy=mcore", "checkpoint.fully_parallel_save=true")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same steps, saved synchronously and by a process of its own. Seconds of each are printed."""
    folder = tmp_path_factory.mktemp("async")
    for name, more in (("sync", ()), ("async", ASYNC)):
        began = time.monotonic()
        done = tpi(folder, *RUN, *more, f"run.dir={name}")
        assert done.returncode == 0, done.stderr
        written = checkpoints.finished(folder / name / "checkpoints")[-1].read_manifest().files
        size = sum(file.bytes for file in written.values())
        print(f"\n{name}: {time.monotonic() - began:.1f} s in all, a checkpoint of {size / 1e9:.2f} GB")
        for line in (folder / name / "logs" / "rank-0.log").read_text().splitlines():
            if "save-checkpoint" in line or "elapsed time per iteration" in line:
                print("  ", line.strip()[:160])
    return folder


def test_the_ledger_is_that_of_the_synchronous_run(runs):
    assert steps(runs, "async") == steps(runs, "sync")


def test_every_save_is_finished_and_hashed_where_it_was_written(runs):
    for saved, expected in zip(
        *(checkpoints.finished(runs / n / "checkpoints") for n in ("async", "sync")), strict=True
    ):
        assert saved.step == expected.step
        saved.verify()
        names = set(saved.read_manifest().files)
        assert names == set(expected.read_manifest().files)
        assert any(name.endswith(".distcp") for name in names)
    assert [item.step for item in checkpoints.finished(runs / "async" / "checkpoints")] == [4, 8, 12]


@pytest.mark.parametrize("step", (4, 8))
def test_a_resumed_run_has_the_same_bits(runs, step):
    """Each save holds its own step, though the rank went on while the writer wrote."""
    shutil.copytree(runs / "async", runs / f"from-{step}")
    done = tpi(runs, "train", "--resume", f"from-{step}", f"checkpoint.ckpt_step={step}")
    assert done.returncode == 0, done.stderr
    assert steps(runs, f"from-{step}") == steps(runs, "sync")
    assert json.loads((runs / f"from-{step}" / "run.json").read_text())["attempts"][1]["from_step"] == step


def test_a_flipped_byte_is_detected(runs):
    run = shutil.copytree(runs / "async", runs / "flipped")
    shard = max((run / "checkpoints" / "iter_0000008").glob("*.distcp"), key=lambda item: item.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    done = tpi(runs, "train", "--resume", "flipped", "checkpoint.ckpt_step=8")
    assert done.returncode == 2, done.stdout
    assert f"{shard.name} has changed since it was written" in done.stderr


def test_a_killed_run_leaves_no_writer_and_no_manifest_of_an_unfinished_save(runs):
    mark = f"TPI_TEST_MARK={runs}"
    words = [sys.executable, "-m", "tp_invariant_recipes", *RUN, *ASYNC, "run.dir=killed"]
    environment, quiet = os.environ | dict([mark.split("=", 1)]), subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=runs, env=environment, stdout=quiet, stderr=quiet)
    folder, deadline = runs / "killed" / "checkpoints" / "iter_0000008", time.monotonic() + 60
    while not list(folder.glob("*.distcp")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while (remaining := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remaining == []
    assert list(folder.glob("*.distcp"))
    assert 8 not in [item.step for item in checkpoints.finished(runs / "killed" / "checkpoints")]
    done = tpi(runs, "train", "--resume", "killed")
    assert done.returncode == 0, done.stderr
    assert steps(runs, "killed") == steps(runs, "sync")


def _processes_with(mark: str) -> list[str]:
    results = []
    for process in os.listdir("/proc"):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if mark.encode() in file.read():
                    results.append(process)
        except OSError:
            continue
    return results
