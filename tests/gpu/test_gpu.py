# SPDX-License-Identifier: Apache-2.0
"""On one GPU: a run repeats and resumes bit for bit. `scripts/gpu` covers larger models and more GPUs."""

import pytest

from tests.gpu.commands import steps, tpi

pytestmark = pytest.mark.gpu

RUN = ("train", "qwen3_toy", "iters=12", "save=6", "numerics=deterministic")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        done = tpi(folder, *RUN, f"run.dir={name}")
        assert done.returncode == 0, done.stderr
    return folder


def test_a_repeated_run_has_the_same_bits(runs):
    assert steps(runs, "a") == steps(runs, "b")


def test_a_resumed_run_has_the_same_bits(runs):
    before = steps(runs, "b")
    resumed = tpi(runs, "train", "--resume", "b", "checkpoint.ckpt_step=6")
    assert resumed.returncode == 0, resumed.stderr
    assert steps(runs, "b") == before
    assert (runs / "b" / "ledger.replaced-1.jsonl").exists()


def test_another_seed_gives_other_bits(runs):
    done = tpi(runs, *RUN, "seed=7", "run.dir=c")
    assert done.returncode == 0, done.stderr
    assert steps(runs, "c") != steps(runs, "a")


VALIDATING = "train qwen3_toy gbs=4 iters=8 save=2 validation.eval_iters=2 validation.eval_interval=2"


@pytest.fixture(scope="module")
def validating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validating")
    done = tpi(folder, *VALIDATING.split(), "cuda_graph=off", "run.dir=off")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", ("te", "full"))
def test_graphs_change_no_bits_of_training_and_validation(validating, kind):
    done = tpi(validating, *VALIDATING.split(), f"cuda_graph={kind}", f"run.dir={kind}")
    assert done.returncode == 0, done.stderr
    assert steps(validating, kind) == steps(validating, "off")
    assert all(b"validation/" in line for line in steps(validating, "off")[1::2])
