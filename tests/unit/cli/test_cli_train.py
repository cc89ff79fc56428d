# SPDX-License-Identifier: Apache-2.0
"""`tpi train` up to the point where Bridge would be imported: mistakes cost nothing and leave nothing."""

import pytest

from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch import plan, record, resume
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.runs.lock import locked
from tp_invariant_recipes.runs.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture(autouse=True)
def empty_here(tmp_path, monkeypatch):
    """The current directory, empty, as is the cache."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    assert {path.name for path in tmp_path.glob("cache/tpi/*")} <= {"bytecode"}  # which Python may have to keep there


@pytest.mark.parametrize("options", ((), ("--dry-run",), ("--continue",)))
def test_where_a_run_cannot_be_written_nothing_is_composed(cli, empty_here, monkeypatch, options):
    """A recipe would be imported for that, and Megatron-Bridge with it."""
    (empty_here / "taken").mkdir()
    (empty_here / "taken" / "file").touch()
    monkeypatch.setattr("tp_invariant_recipes.launch.record.compose", None)
    ended = cli("train", "recipe=mine.py:small", "run.dir=taken", *options)
    assert ended.status == 2
    assert ended.err == "error: run.dir=taken is not empty: choose another run.dir\n"


def test_a_plan_from_before_another_command_began_there_is_out_of_date(empty_here):
    """Both found no run."""
    first, second = (plan.new(compose("qwen3_toy", ["run.dir=run"])) for _ in range(2))
    record.check_current(second)
    record.write(first, attempt=False)
    with pytest.raises(RunError, match="another command has begun to train in run since this one looked there"):
        record.check_current(second)
    submitted = resume.resume_or_start(compose("qwen3_toy", ["run.dir=run"]))
    record.check_current(submitted)
    record.write(submitted)
    with pytest.raises(RunError, match="another command has begun"):
        record.check_current(submitted)


def test_a_run_that_a_scheduler_repeats_keeps_its_numerics_whatever_the_default_is_now(empty_here):
    request = record.RunRequest("qwen3_toy", (parse("run.dir=run"),), continues=True)
    assert request.composed().config.numerics.mode == "tree"
    record.write(plan.new(compose("qwen3_toy", ["run.dir=run"], numerics="stock")))
    assert request.composed().config.numerics.mode == "stock"


def test_a_run_of_another_model_is_not_resumed(cli, empty_here):
    with locked(RunDir(empty_here / "run")):
        record.write(plan.new(compose("qwen3_toy", ["run.dir=run"])))
    before = sorted((p.name, p.read_bytes()) for p in empty_here.rglob("*") if p.is_file())
    for asked in ("--resume run", "--continue run.dir=run"):
        ended = cli("train", "qwen3_8b", *asked.split())
        assert (ended.status, ended.err) == (2, f"error: {asked} is a run of qwen3_toy, not of qwen3_8b\n")
    ended = cli("train", "--resume", "run", "seed=1", "lr=0.1")
    assert ended.status == 2
    assert "rng.seed was 1234 and is 1 now" in ended.err
    assert "optimizer.lr was 0.003 and is 0.1 now" in ended.err
    ended = cli("train", "--resume", "run", "numerics=stock")
    assert ended.status == 2
    assert "numerics.data_shards was 1 and is None now; leave out numerics=stock, or set" in ended.err
    assert sorted((p.name, p.read_bytes()) for p in empty_here.rglob("*") if p.is_file()) == before


def test_a_run_continues_with_the_whole_state_of_its_checkpoint(cli, empty_here):
    """Each of these keys would make another run of it under the same identity. One message names all problems."""
    with locked(RunDir(empty_here / "run")):
        record.write(
            plan.new(
                compose("qwen3_toy", ["run.dir=run", "numerics=stock", "checkpoint.load_main_params_from_ckpt=true"])
            )
        )
    omitted = ("finetune=true", "load_optim=false", "load_rng=false", "dist_ckpt_strictness=ignore_all")
    keys = [f"checkpoint.{item}" for item in omitted]
    ended = cli("train", "--resume", "run", "iters=60", *keys)
    assert ended.status == 2
    assert all(f"- {key}: a run continues with the whole state of its checkpoint" in ended.err for key in keys)
    assert "set scheduler.lr_decay_iters=50 (unset, it follows iters, and every step's learning rate" in ended.err
    assert "load_main_params" not in ended.err  # the run began with it
    may = ["save=3", "checkpoint.finetune=false", "checkpoint.async_save=false", "checkpoint.fully_parallel_load=true"]
    now = compose("qwen3_toy", may)
    assert fingerprint.other_state((), now.overrides, now.config) == []


def test_the_device_is_what_the_driver_shows(monkeypatch):
    assert plan.detect_device() == "cpu"
    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu("NVIDIA H200", (9, 0), 1)])
    assert plan.detect_device() == "gpu"
