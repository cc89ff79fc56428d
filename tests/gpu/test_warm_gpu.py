"""On a GPU: a rank that has trained another run writes the ledger of a rank of its own, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
]
MODEL = ("qwen3_toy", "seq=64", "gbs=2", "iters=3", "ledger.digests=1")

# tpi whose forked ranks note their process, which pytest's cannot be: it may have started CUDA.
PROGRAM = """
import os
from tests.distributed.test_warm_ledgers import _note_process
from tp_invariant_recipes.cli import main
from tp_invariant_recipes.config import environment
from tp_invariant_recipes.host import bridge
os.environ.update(environment.settings("gpu", os.environ))
bridge.load()
_note_process()
main.main()
"""


def tpi(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ("tree", "stock", "portable"))
def test_the_second_run_of_two(tmp_path, mode):
    tpi(tmp_path, "sweep", *MODEL, f"numerics={mode}", "seed=1,2", "--dir", "s")
    tpi(tmp_path, "train", *MODEL, f"numerics={mode}", "seed=2", "run.dir=cold")
    first, second = (tmp_path / "s" / f"seed{seed}" for seed in (1, 2))
    logs = "".join(log.read_text()[-1000:] for log in (first / "logs").glob("rank*"))
    assert (first / "process").read_text() == (second / "process").read_text(), logs
    assert (second / "ledger.jsonl").read_bytes() == (tmp_path / "cold" / "ledger.jsonl").read_bytes()
    assert (first / "ledger.jsonl").read_bytes() != (second / "ledger.jsonl").read_bytes()
