# SPDX-License-Identifier: Apache-2.0
"""`tpi train` and `tpi compare`, end to end."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.distributed.faults import at_step, reached
from tests.distributed.small_models import DENSE
from tp_invariant_recipes.data.text import prepare
from tp_invariant_recipes.ledger.bits import bits_float
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.start.forking import can_fork

STEPS = 15
TEXT = ("model.num_layers=1", "seq=64", "gbs=1", "lr=1e-2", f"scheduler.lr_decay_iters={STEPS}", "numerics=stock")


@pytest.fixture(scope="module")
def runs(shared, text):
    """A training at tp=1, of whose standard error there is `runs.lines`, and the first steps of it at tp=2, twice."""
    words = (*TEXT, "data=text", f"data.path={text}")
    for name, iters in (("tp2", 3), ("tp2-again", 2)):
        shared("train", "qwen3_toy", "tp=2", *words, f"iters={iters}", f"run.dir={name}", status=0)
    more = (f"iters={STEPS}", "logging=tensorboard", "ledger.digests=0", "run.dir=tp1")
    long = shared("train", "qwen3_toy", *words, *more, status=0)
    shared.lines = long.stderr.splitlines()
    return shared


def test_the_loss_falls_from_about_ln_vocabulary(runs):
    losses = [bits_float(step.loss) for step in runs.ledger("tp1")]
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(512)) < 0.6
    assert losses[-1] < losses[0] - 2


def test_a_repeated_run_has_the_same_bits(runs):
    lines = [(runs.folder / name / "ledger.jsonl").read_bytes().split(b"\n")[1:] for name in ("tp2", "tp2-again")]
    assert len(lines[1]) == 3  # the last is empty, and the last step has more digests
    assert lines[0][:1] == lines[1][:1]
    assert "2 of 3 steps" in runs("compare", "tp2", "tp2-again", status=0).stdout


def test_a_run_directory_says_what_was_run(runs):
    folder = runs.folder / "tp2"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    run = json.loads((folder / "run.json").read_text())
    header = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])
    assert config["model"]["tensor_model_parallel_size"] == 2
    assert run["overrides"][0] == "tp=2"
    assert run["attempts"][0]["command"].startswith("tpi train qwen3_toy tp=2")
    assert header["layout"] == {"tp": 2, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "sp": True}
    assert header["identity_hash"] == run["identity_hash"]
    assert header["notes"]["tokenizer.vocab_includes_eod"] is True
    assert header["notes"]["tokenizer.eod"] == 256
    assert header["numerics"] == {"mode": "stock", "initial_weights": "megatron"}
    assert header["versions"]["megatron_bridge"]
    assert json.loads((folder / "environment.json").read_text())["OMP_NUM_THREADS"] == "1"
    assert "iteration        3/       3" in (folder / "logs" / "bridge.log").read_text()
    assert {f.name for f in (folder / "logs").iterdir()} == {"bridge.log", "rank-0.log", "rank-1.log"}


def test_the_digest_of_the_data_is_of_the_text(runs, text, tmp_path):
    (tmp_path / "other.txt").write_text(text.read_text().replace("best", "bест"))
    same, other = (prepare(file, tmp_path / file.stem).digest for file in (text, tmp_path / "other.txt"))
    assert same != other
    assert read(runs.folder / "tp2").header.identity["data.digest"] == same


def test_tensorboard_gets_bridges_curves(runs):
    assert any((runs.folder / "tp1" / "tensorboard").glob("events.out.tfevents.*"))
    assert runs.lines[0] == "importing Megatron-Bridge and checking the configuration …"
    assert runs.lines[2].startswith("text ")
    assert runs.lines[4] == "starting 1 cpu rank …"
    assert runs.lines[-3:] == [
        "ledger: tp1/ledger.jsonl",
        "tensorboard --logdir tp1/tensorboard",
        "next: tpi compare tp1 RUN_B   tpi report tp1",
    ]


def files(folder: Path) -> dict[Path, int]:
    """All files and folders but what the tests' commands print, and when each was written."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.suffix not in (".out", ".err")}


def test_a_dry_run_checks_everything_and_writes_nothing(tpi, text):
    """Text that has yet to be prepared stays so. The control is every other test of this file: it writes a run."""
    before = files(tpi.folder)
    seen = tpi("train", "qwen3_toy", "tp=2", "data=text", f"data.path={text}", "logging=wandb", "--dry-run", "--json")
    assert seen.status == 0, seen.stderr
    plan = json.loads(seen.stdout)
    assert (plan["ranks"], plan["start"], plan["of"], plan["data_missing"]) == (2, 0, 50, True)
    assert plan["memory"]["rank"] == sum(plan["memory"]["parts"].values())
    refused = tpi("train", "qwen3_toy", "model.recompute_granularity=full", "--dry-run")
    assert refused.status == 2
    assert "Megatron-Bridge refuses this configuration" in refused.stderr
    assert refused.stdout == ""  # memory is for a machine that cannot start the run, such as a login node
    assert files(tpi.folder) == before


def test_invariant_numerics_fill_no_tensor_with_nan(tpi):
    """torch's deterministic mode would, each time that memory is taken."""

    def look(context):
        filled = torch.utils.deterministic.fill_uninitialized_memory
        assert (torch.are_deterministic_algorithms_enabled(), filled) == (True, False)

    tpi("train", *DENSE.split(), "iters=1", "gbs=1", before=at_step(1, look), status=0)
    assert reached(tpi.folder, 1)()


def test_a_dry_run_of_a_run_to_go_on_with(runs):
    before = files(runs.folder)
    seen = runs("train", "--resume", "tp2", "tp=4", "iters=40", "--dry-run", status=0)
    assert "on 4 cpu ranks, 40 steps" in seen.stdout
    assert "a node, 4 ranks" in seen.stdout
    assert files(runs.folder) == before


@pytest.mark.release
def test_the_installed_command_trains(tmp_path):
    """Nothing shared with this process: the way a user starts it."""
    command = [sys.executable, "-m", "tp_invariant_recipes", "train", "qwen3_toy", "tp=2", "iters=2", "run.dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "completed at step 2 of 2" in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.usefixtures("bridge")
def test_what_an_import_sets_does_not_keep_gpu_ranks_from_being_forked():
    """torch's compiler sets a variable as it is imported, with Bridge or later. A forked rank has it too."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # as the import does, which another test of this process may have made

    name = "TORCHINDUCTOR_CACHE_DIR"
    before = {key: value for key, value in os.environ.items() if key != name}
    assert name in os.environ
    assert can_fork(before, probe=lambda: True)


def test_a_profile_lies_in_the_run_directory(tpi):
    """Without TensorBoard, too, beside whose directory Bridge writes it."""
    profiled = "profiling.use_pytorch_profiler=true profiling.profile_step_start=1 profiling.profile_step_end=2"
    tpi("train", *DENSE.split(), "iters=3", *profiled.split(), "run.dir=profiled", status=0)
    assert [path.name for path in (tpi.folder / "profiled" / "torch_profile").iterdir()] == ["rank-0.json.gz"]
    assert not (tpi.folder / "None").exists()
    assert not (tpi.folder / "torch_profile").exists()
