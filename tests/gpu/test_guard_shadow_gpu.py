# SPDX-License-Identifier: Apache-2.0
"""Shadow steps of two replicas, each with a GPU: Gloo, by which two would share one, sends no tensor of a GPU."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.distributed.scenario import unequal
from tests.gpu.side_by_side import Run, gpus_for, train
from tp_invariant_recipes.ledger.open import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(600),
]

TOY = "qwen3_toy seq=128 gbs=2 iters=4 cuda_graph=off model.num_layers=2 numerics.data_shards=2"
SHADOW = f"{TOY} dp=2 guard=shadow guard.every=1"
RUNS = {"alone": TOY, "two": f"{TOY} dp=2", "guarded": SHADOW, "samples": f"{SHADOW} guard.products=32"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shadow")
    return folder, train(folder, [Run(name, words, gpus_for(words)) for name, words in RUNS.items()])


@pytest.mark.parametrize("name", ("two", "guarded", "samples"))
def test_a_guard_is_quiet_and_changes_no_bit(trained, name):
    folder, errors = trained
    assert errors[name] is None, errors[name]
    assert unequal(list(read(folder / name).steps), list(read(folder / "alone").steps)) == []
    if name != "two":
        log = (folder / name / "logs" / "rank-1.log").read_text()
        assert re.search(r"guard: \d+ checks, 0 of them detected silent data corruption", log)


@pytest.mark.parametrize(
    "when, judge", (("once", "its own recomputation, "), ("always", "at other offsets of the launches"))
)
def test_a_shadow_step_names_the_rank(tmp_path, when, judge):
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.shadow_planted", "norm", when, str(tmp_path)],
        input=json.dumps([asdict(Run("planted", SHADOW, 2))]),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])["planted"]
    assert output is not None
    assert "silent data corruption at step 2: forward pass of decoder.layers." in output
    assert re.search(r"\nrank 1 on .*, UUID GPU-", output)
    assert "one of these" not in output
    assert judge in output
