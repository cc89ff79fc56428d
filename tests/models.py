# SPDX-License-Identifier: Apache-2.0
"""Which models a test goes through in `make test`, and which only in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest

# They differ from a model of the same family in sizes alone, and have no evidence of their own in docs/.
OTHER_SIZES = frozenset(
    (
        "kimi_k2", "llama3_70b", "llama3_8b", "llama31_405b", "llama31_70b", "llama31_8b", "llama32_3b",
        "qwen25_14b", "qwen25_1p5b", "qwen25_32b", "qwen25_3b", "qwen25_72b", "qwen25_7b", "qwen3_14b", "qwen3_1p7b",
        "qwen3_235b_a22b", "qwen3_32b", "qwen3_4b",
    )
)  # fmt: skip


def sparing(models: Iterable[str]) -> list[Any]:
    """All of them as parameters; OTHER_SIZES are for a release."""
    return [pytest.param(model, marks=pytest.mark.release) if model in OTHER_SIZES else model for model in models]


def small_ones(models: Iterable[str]) -> list[Any]:
    """All of them as parameters; in `make test` those for a CPU, which have all fields of their family."""
    return [model if model.endswith("_toy") else pytest.param(model, marks=pytest.mark.release) for model in models]


def degree(model: str) -> int:
    """A tp, and a number of virtual shards, that divides every part of the model: 2, or 1 of one query group."""
    return 1 if model == "gemma3_1b" else 2
