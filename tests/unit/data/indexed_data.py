"""What tests of prepared data share: the files of a dataset, and the parts that are written."""

import gc
from pathlib import Path

import pytest

from tp_invariant_recipes.data import parts

SUFFIXES = (".bin", ".json", ".idx")


@pytest.fixture(scope="module", autouse=True)
def cheap_garbage_collection():
    import megatron.core.datasets.indexed_dataset  # noqa: F401

    gc.freeze()  # its builder collects garbage for each part, 0.1 s over all that is imported here
    yield
    gc.unfreeze()


def files_of(prefix: Path) -> dict[str, bytes]:
    return {suffix: prefix.with_name(prefix.name + suffix).read_bytes() for suffix in SUFFIXES}


def count_parts(monkeypatch) -> list[Path]:
    """The parts written from now on."""
    written, real = [], parts._write_part
    monkeypatch.setattr(parts, "_write_part", lambda path, *rest: written.append(path) or real(path, *rest))
    return written
