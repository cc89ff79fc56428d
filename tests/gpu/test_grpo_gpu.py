# SPDX-License-Identifier: Apache-2.0
"""`examples/grpo.py` on GPUs: it ends well, and has one ledger for tp=1, tp=2 and a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUNS = {"first": "tp=1", "second": "tp=2", "cpu": "device=cpu", "control": "lr=2e-3"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(600),
]


def test_the_example_has_one_ledger(tmp_path):
    started = []
    for name, words in RUNS.items():
        ranks = "2" if words == "tp=2" else "1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = [*torchrun, str(ROOT / "examples/grpo.py"), str(tmp_path / name), "iters=3", words]
        started.append(subprocess.Popen(command, cwd=ROOT))
    assert [process.wait() for process in started] == [0] * len(RUNS)
    for name, status in {"second": 0, "cpu": 0, "control": 2}.items():
        words = ["compare", str(tmp_path / "first"), str(tmp_path / name)]
        done = subprocess.run([sys.executable, "-m", "tp_invariant_recipes", *words], cwd=ROOT)
        assert done.returncode == status, name
    rows = [json.loads(line) for line in (tmp_path / "second" / "rewards.jsonl").read_text().splitlines()]
    assert [row["largest_log_ratio"] for row in rows] == [0.0] * 3
