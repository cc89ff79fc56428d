# SPDX-License-Identifier: Apache-2.0
"""examples/rl_client.py: the trainer and a server in another layout agree exactly, before each update."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.serving import TPI, served

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.release
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SHAPE = ("model.vocab_size=32", "model.kv_channels=32", "seq=16", "gbs=8")
START = ("numerics=portable", *SHAPE, "iters=1", "save=1", "device=cpu")
STALE = "rl_client.Server.refit = lambda self: vars(self).setdefault('version', self.post('generate', input_ids=[1], "
STALE += "sampling_params={'max_new_tokens': 1, 'temperature': 0})['meta_info']['weight_version'])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    subprocess.run([*TPI, "train", "qwen3_toy", *START, "run.dir=start"], cwd=folder, check=True)
    subprocess.run([*TPI, "export", "start", "model"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("change", ("", STALE), ids=("pushed", "stale"))
def test_the_client_samples_with_the_weights_that_it_trains(folder, change):
    """Control: weights that are not pushed."""
    program = folder / "program.py"
    lines = [
        "import sys",
        "from functools import partial",
        "from pathlib import Path",
        f"sys.path.insert(0, {str(EXAMPLES)!r})",
    ]
    lines += ["import rl_client", change, "run, url, source, *words = sys.argv[1:]"]
    lines += ["make = partial(rl_client.Server, url=url, source=source, folder=Path(run))"]
    program.write_text("\n".join([*lines, "rl_client.grpo.main(run, *words, engine=make)"]))
    run = "stale" if change else "pushed"
    with served(folder / "model", "tp=2", log=folder / f"{run}.log") as url:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        script = program if change else EXAMPLES / "rl_client.py"
        command = [*torchrun, str(script), run, url, "model", "iters=3", "device=cpu"]
        subprocess.run(command, cwd=folder, check=True, timeout=300)
    rows = [json.loads(line) for line in (folder / run / "rewards.jsonl").read_text().splitlines()]
    ratios = [row["largest_log_ratio"] for row in rows]
    assert len(ratios) == 3
    assert all(ratios) if change else ratios == [0.0] * 3
