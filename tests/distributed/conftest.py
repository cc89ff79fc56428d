"""Real trainings on the CPU, ranks as processes."""

import gc
import os
from pathlib import Path

import pytest

# One thread a rank, before any test module imports torch: eight ranks on two cores would wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 400


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real words."""
    file = tmp_path_factory.mktemp("text") / "cities.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture(scope="session")
def families(bridge: None) -> None:
    """Bridge's families of models, which wait until somebody asks for them: once here, and not in every fork."""
    import megatron.bridge.recipes  # noqa: F401

    gc.collect()
    gc.freeze()
