# SPDX-License-Identifier: Apache-2.0
"""On two and four GPUs: sums through peers' memory have the bits of NCCL's exchange, in graphs and whole runs too."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.commands import ROOT, environment, steps, tpi

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(300),
]


def ranks(count: int, case: str) -> list:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port"]
    command += [str(20000 + os.getpid() % 20000), "-m", "tests.gpu.peer_ranks", case]
    # With one connection, what follows a kernel on the stream of copies would wait for them on any stream.
    variables = environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("count", (2, 4))
@pytest.mark.parametrize("case", ("sums", "gathers", "exchanges", "graphs", "after_another_training", "both", "late"))
def test_peers_have_the_bits_of_nccl(count, case):
    assert all(ranks(count, case))


def test_another_order_of_ranks_has_other_bits():
    assert not any(ranks(4, "orders_differ"))


@pytest.mark.parametrize("count", (2, 4))
@pytest.mark.parametrize("only", ("first", "second", "early"))
def test_with_one_barrier_or_without_waiting_bits_differ(count, only):
    assert not all(ranks(count, only))


@pytest.mark.parametrize("words", ("tp=2", "tp=4", "tp=2 cuda_graph=te", "tp=2 pp=2", "tp=4 sp=false cuda_graph=off"))
def test_a_run_has_one_ledger_with_and_without(tmp_path, words):
    if torch.cuda.device_count() < (4 if "4" in words or "pp" in words else 2):
        pytest.skip("needs four GPUs")
    for choice in ("never", "always"):
        overrides = (*words.split(), f"device.peer_memory={choice}", f"run.dir={choice}")
        done = tpi(tmp_path, "train", "qwen3_toy", "gbs=4", "iters=8", *overrides)
        assert done.returncode == 0, done.stderr
    assert steps(tmp_path, "always") == steps(tmp_path, "never")
    logs = [(tmp_path / choice / "logs" / "rank-0.log").read_text() for choice in ("never", "always")]
    size = words[3]
    assert "tensor-parallel ranks go through" not in logs[0]
    assert f"sums over {size} tensor-parallel ranks go through their memory" in logs[1]


@pytest.mark.parametrize("layout", ("tp=2", "dp=2"))
def test_the_default_goes_through_memory(tmp_path, layout):
    words = ("qwen3_0p6b", layout, "gbs=2", "model.num_layers=2", "seq=2048", "iters=6", "ledger.state_digests=1")
    for name, more in (("auto", ()), ("never", ("device.peer_memory=never",))):
        done = tpi(tmp_path, "train", *words, *more, f"run.dir={name}")
        assert done.returncode == 0, done.stderr
    assert steps(tmp_path, "auto") == steps(tmp_path, "never")
    assert "go through their memory" in (tmp_path / "auto" / "logs" / "rank-0.log").read_text()
