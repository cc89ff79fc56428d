# SPDX-License-Identifier: Apache-2.0
"""examples/grpo.py: rollouts and trainer agree exactly before each update, and every tp has one ledger."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# A bit of each log-probability of the rollout.
A_BIT = """
import dataclasses, numpy as np
from tp_invariant_recipes.features.rollouts.engine import Engine
generate = Engine.generate
def changed(values):
    return tuple(np.nextafter(np.array(values, np.float32), np.float32(0)).tolist())
Engine.generate = lambda self, requests: [
    dataclasses.replace(c, log_probabilities=changed(c.log_probabilities)) for c in generate(self, requests)
]
"""


@pytest.fixture(scope="module")
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_is_greatest_for_the_sum(grpo):
    question = 3, grpo.PLUS, 4, grpo.EQUALS
    answers = [(7, grpo.END), (8, grpo.END), (7, 7, 7), (19, grpo.END), (grpo.PLUS, grpo.END)]
    rewards = [grpo.reward(question, answer) for answer in answers]
    assert rewards == sorted(rewards, reverse=True)
    assert len(set(rewards)) == 5
    assert (rewards[0], rewards[-1]) == (1, 0)


def run(folder, name, *words, change="", ranks=1):
    (folder / f"{name}.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n{change}\nimport grpo\ngrpo.main(*sys.argv[1:])"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, f"{name}.py", name, "iters=3", "device=cpu", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / name / "rewards.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert done.stdout.count("largest |log-ratio|") == 3
    return rows


@pytest.mark.release
def test_rollouts_and_trainer_agree_in_every_layout(shared):
    """Controls: a bit of the rollouts, and another learning rate."""
    folder = shared.folder
    first, second = run(folder, "grpo-1"), run(folder, "grpo-2", "tp=2", ranks=2)
    assert first == second
    assert [row["largest_log_ratio"] for row in first] == [0.0] * 3
    assert (folder / "grpo-1" / "reward.svg").stat().st_size > 1000
    shared("compare", "grpo-1", "grpo-2", status=0)
    changed = run(folder, "grpo-bit", change=A_BIT)
    assert all(row["largest_log_ratio"] > 0 for row in changed)
    run(folder, "grpo-lr", "lr=2e-3")
    shared("compare", "grpo-1", "grpo-lr", status=2)
    shared("compare", "grpo-1", "grpo-bit", status=1)
