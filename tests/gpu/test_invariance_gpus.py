"""On two GPUs: one ledger at tp=1 and tp=2 with invariant numerics, two with stock; checkpoints move both ways."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(900),
]


def train(folder, run: str, *arguments: str):
    command = [sys.executable, "-m", "tp_invariant_recipes", "train", "qwen3_toy", *arguments, f"run.dir={run}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / run / "ledger.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize("numerics, same", (("tree", True), ("gather", True), ("stock", False)))
@pytest.mark.parametrize("backend", ("auto", "unfused"))
def test_one_ledger_unless_stock(tmp_path, numerics, same, backend):
    common = ("iters=6", "mbs=2", f"numerics={numerics}", f"model.attention_backend={backend}")
    one, two = (train(tmp_path, f"tp{tp}", *common, f"tp={tp}") for tp in (1, 2))
    assert (one == two) is same


def test_checkpoints_move_both_ways(tmp_path):
    """Weights saved under one numerics are read under the other: the first loss hardly moves."""
    losses = {}
    for saves, loads in (("stock", "tree"), ("tree", "stock")):
        train(tmp_path, f"{saves}-saves", "iters=4", "save=4", f"numerics={saves}", "tp=1")
        checkpoint = f"checkpoint.pretrained_checkpoint={tmp_path / f'{saves}-saves' / 'checkpoints'}"
        for mode in (saves, loads):
            run = train(tmp_path, f"{saves}-to-{mode}", "iters=1", f"numerics={mode}", "tp=2", checkpoint)
            losses[saves, mode] = run[0]["loss"]["value"]
        assert losses[saves, loads] == pytest.approx(losses[saves, saves], rel=1e-3)
