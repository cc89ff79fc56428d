# SPDX-License-Identifier: Apache-2.0
"""Messages by NCCL and over symmetric memory: a flipped bit is found and named, in CUDA graphs too; and a run has one
ledger by each of NCCL's algorithms and protocols, in each order of devices, with and without symmetric memory.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.commands import ROOT, environment, steps, tpi

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_a_flipped_bit_is_found():
    """On as many GPUs as there are: on one, a rank sends to itself."""
    count = min(torch.cuda.device_count(), 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port"]
    command += [str(20000 + os.getpid() % 20000), "-m", "tests.gpu.message_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])["said"]
    assert len(said) == (4 if count == 1 else 11)
    for name, findings in said:
        assert findings[:2] == [None, None], name
        assert findings[3] is None, name
        assert findings[2] is not None, name
        assert findings[2].startswith("2 "), name
        assert findings[2].endswith(f"received otherwise by {count - 1}"), name


# --- one ledger ---

WORDS = "qwen3_toy gbs=4 iters=4 ledger.state_digests=1 device.peer_memory=never"
EVIDENCE = {
    "NCCL_ALGO=Ring": {"NCCL_ALGO": "Ring"},
    "NCCL_PROTO=Simple": {"NCCL_PROTO": "Simple"}, "NCCL_PROTO=LL": {"NCCL_PROTO": "LL"},
    "NCCL_PROTO=LL128": {"NCCL_PROTO": "LL128"},
    "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"},
    "the devices in reverse": {"CUDA_VISIBLE_DEVICES": "reversed"},
    "device.peer_memory=always": {},
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("layout", ("tp=2", "tp=2 dp=2"))
def test_a_run_has_one_ledger_however_bytes_are_moved(tmp_path, monkeypatch, layout):
    """With a guard that digests every message, and would end a run."""
    count = 2 if layout == "tp=2" else 4
    if torch.cuda.device_count() < count:
        pytest.skip("needs four GPUs")
    words = (*WORDS.split(), *layout.split(), "guard=products", "guard.collectives=all")
    for n, (row, variables) in enumerate({"as it is": {}, **EVIDENCE}.items()):
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                order = ",".join(map(str, reversed(range(count))))
                changed.setenv(name, order if value == "reversed" else value)
            done = tpi(tmp_path, "train", *words, *(row.split() if row.startswith("device.") else ()), f"run.dir=r{n}")
        assert done.returncode == 0, (row, done.stderr)
        assert steps(tmp_path, f"r{n}") == steps(tmp_path, "r0"), row
