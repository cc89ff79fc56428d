# SPDX-License-Identifier: Apache-2.0
"""Tasks of NeMo-Run that the plugin changes: what it makes of a task, and ledgers of its local executor."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ledgers import steps
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.ledger.certificate import certify
from tp_invariant_recipes.ledger.open import read

pytestmark = pytest.mark.usefixtures("families")

ROOT = Path(__file__).parents[3]

# A task as people write it: Bridge's pretrain() of a ConfigContainer. It knows nothing of the plugin.
TASK = """
    import sys

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from tp_invariant_recipes import recipe

    pretrain(recipe("qwen3_toy", sys.argv[1], "numerics=deterministic", seq=64, iters=2, device="cpu"), forward_step)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    file = tmp_path / "task.py"
    file.write_text(textwrap.dedent(TASK))
    return file


def _plugin(**settings):
    from tp_invariant_recipes.nemo.plugin import InvariantPlugin

    return InvariantPlugin(**settings)


def _local(ranks: int = 1, **variables: str):
    import nemo_run as run

    return run.LocalExecutor(ntasks_per_node=ranks, launcher="torchrun", env_vars=variables)


def test_a_script_runs_through_the_runner(bridge):
    import nemo_run as run

    task, executor = run.Script("train.py", args=["--a"], entrypoint="python"), _local(A="1")
    _plugin(ledger="/l", virtual_shards=4).setup(task, executor)
    assert (task.m, task.path, task.args) == (True, "tp_invariant_recipes.nemo", ["train.py", "--a"])
    assert executor.env_vars == {"A": "1", "NVTE_TP_INVARIANT_MODE": "1", "TPI_SHARDS": "4", "TPI_LEDGER": "/l"}
    module = run.Script("my.train", entrypoint="python", m=True)
    _plugin(ledger="/l").setup(module, _local())
    assert module.args == ["-m", "my.train"]


def test_a_partial_of_bridges_pretrain_calls_tpis(bridge):
    import nemo_run as run
    from megatron.bridge.training.pretrain import pretrain

    from tp_invariant_recipes.nemo import task as actual

    task = run.Partial(pretrain, callbacks=None)
    _plugin(ledger="/l").setup(task, _local())
    assert task.__fn_or_cls__ is actual.pretrain


def test_what_the_plugin_cannot_cover_is_refused(bridge):
    import nemo_run as run

    refused = (
        (run.Script(inline="echo 1"), {}, ["an inline script has no file"]),
        (run.Script("a.sh"), {}, ["entrypoint=bash: only scripts of Python"]),
        (run.Partial(textwrap.dedent, text="a"), {}, ["dedent is not Bridge's pretrain()"]),
        (
            run.Script("a.sh", env={"TPI_SHARDS": "2"}),
            {"NVTE_TP_INVARIANT_MODE": "0"},
            ["entrypoint=bash", "the executor sets NVTE_TP_INVARIANT_MODE=0", "the task sets TPI_SHARDS=2"],
        ),
    )
    for task, variables, says in refused:
        executor = _local(**variables)
        with pytest.raises(ConfigError) as error:
            _plugin(ledger="/l").setup(task, executor)
        assert [p.startswith(word) for p, word in zip(error.value.problems, says, strict=True)] == [True] * len(says)
        assert executor.env_vars == variables  # nothing has changed
    for settings in ({"virtual_shards": 3}, {"ledger": ""}):
        with pytest.raises(ConfigError):
            _plugin(**({"ledger": "/l"} | settings)).setup(run.Script("a.py", entrypoint="python"), _local())


# As in docs/nemo-run.md. NeMo-Run reads its environment as it is imported, so it has a process of its own.
EXPERIMENT = """
    import sys

    import nemo_run as run

    from tp_invariant_recipes.nemo.plugin import InvariantPlugin

    script, ranks, ledger = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    task = run.Script(script, args=[f"tp={ranks}"], entrypoint="python")
    executor = run.LocalExecutor(ntasks_per_node=ranks, launcher="torchrun")
    with run.Experiment("toy") as experiment:
        experiment.add(task, executor=executor, plugins=[InvariantPlugin(ledger=ledger)], name=f"tp{ranks}")
        experiment.run(detach=False, tail_logs=True)
"""


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_local_executor_of_nemo_run(script, tmp_path):
    file = tmp_path / "experiment.py"
    file.write_text(textwrap.dedent(EXPERIMENT))
    there = {
        "NEMORUN_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # torchrun, and the Python of its ranks
    }
    (tmp_path / "home").mkdir()
    for ranks in ("1", "2"):
        words = [sys.executable, file, script, ranks, tmp_path / f"tp{ranks}"]
        done = subprocess.run(words, env=os.environ | there, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / f"tp{ranks}").exists(), done.stdout + done.stderr
    first, second = (read(tmp_path / f"tp{ranks}") for ranks in "12")
    assert [step.step for step in first.steps] == [1, 2]
    assert steps(tmp_path / "tp1") == steps(tmp_path / "tp2")
    assert first.header.identity == second.header.identity
    assert (first.header.layout["tp"], second.header.layout["tp"]) == (1, 2)
    assert certify(tmp_path / "tp2")
