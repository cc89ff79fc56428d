"""scripts/gpu: every row composes for the GPUs that it names."""

from itertools import product
from pathlib import Path

import pytest

from tp_invariant_recipes.config.compose import compose

SCRIPTS = Path(__file__).parents[3] / "scripts"


def runs(command: str) -> list[tuple[str, list[str]]]:
    """Model and overrides of every run that a command makes."""
    kind, model, *rest = command.split()
    if kind not in ("train", "verify", "bench", "audit") or model.startswith("-"):
        return []
    overrides = [word for word in rest if "=" in word and not word.startswith(("run.dir=", "weights="))]
    if kind == "audit":
        overrides.append("numerics=stock")  # its default
    pairs = [override.split("=", 1) for override in overrides]
    each = [[f"{key}={value}" for value in _values(text)] for key, text in pairs]
    return [(model, [*item]) for item in product(*each)]


def _values(text: str) -> list[str]:
    return [text] if text.startswith(("'", "[")) else text.split(",")


@pytest.mark.release
def test_every_row_composes_and_fits_the_gpus_that_it_names(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_rows import ROWS

    for name, row in ROWS.items():
        most = 0
        for command in row.commands:
            ranks = [
                compose(model, overrides, device="gpu").config.layout.world for model, overrides in runs(command.words)
            ]
            assert max(ranks, default=command.gpus) == command.gpus, (name, command)
            most = max(most, command.gpus)
        assert most == row.gpus, name
