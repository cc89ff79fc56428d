# SPDX-License-Identifier: Apache-2.0
"""Real trainings on the CPU, ranks as processes."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.distributed.scenario import Scenario
from tests.forks import Tpi, freeze
from tests.warm import load_portable
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.start import bridge

# One thread a rank, before any test module imports torch: eight ranks on two cores would wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 400


def pytest_pycollect_makemodule() -> None:
    """Load Bridge before a test module imports a part of Megatron alone, which would bring wandb: 3 s of each worker.

    A hook of collecting, since the process that only distributes tests reads this file as well.
    """
    os.environ.update(environment.settings("cpu", {}))
    bridge.load()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real words."""
    file = tmp_path_factory.mktemp("text") / "cities.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def scenario(bridge: None, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Trainings that any test of the session may read, and none may change (scenario.py)."""
    own = tmp_path_factory.getbasetemp()
    session = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return Scenario(Tpi(tmp_path_factory.mktemp("scenarios")), session / "scenario-runs")


@pytest.fixture(scope="session")
def families(bridge: None) -> None:
    """Bridge's families of models, which wait until somebody asks for them: once here, and not in every fork."""
    import megatron.bridge.recipes  # noqa: F401

    freeze()


@pytest.fixture(scope="session")
def modelopt(families: None) -> None:
    """What Bridge's conversion of weights imports: once here, and not in every fork."""
    import modelopt.torch.peft  # noqa: F401

    freeze()


@pytest.fixture(scope="session")
def portable_loops(bridge: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The loops of numerics=portable as one rank compiles them, which takes it 30 s in a new checkout.

    numba keeps them beside their source. Without this every rank of the first runs would compile all of them, and so
    would those of another worker. Forks inherit them loaded.
    """
    tpi = Tpi(tmp_path_factory.mktemp("portable"))
    with (tmp_path_factory.getbasetemp().parent / "portable-loops").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = tpi("train", "qwen3_toy", "numerics=portable", "seq=64", "gbs=1", "iters=1", "model.num_layers=1")
    assert done.status == 0, done.stderr
    load_portable()
    freeze()
