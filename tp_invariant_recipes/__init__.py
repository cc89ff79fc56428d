# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge training whose bits do not depend on the tensor-parallel degree.

    import tp_invariant_recipes as tpi

    run = tpi.train("qwen3_toy", tp=2, iters=10, device="cpu")
    print(tpi.compare(run, tpi.train("qwen3_toy", tp=1, iters=10, device="cpu")))

These names are public (docs/api.md). Each is imported when it is first read.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_invariant_recipes.api.commands import audit, bisect, certify, compare, score, train, verify
    from tp_invariant_recipes.api.megatron import pretrain, recipe
    from tp_invariant_recipes.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        HardwareFault,
        Interrupted,
        LedgerError,
        RunError,
        TpiError,
    )
    from tp_invariant_recipes.features.rollouts.engine import Engine
    from tp_invariant_recipes.features.rollouts.requests import Completion, Request, Sampling
    from tp_invariant_recipes.ledger.view import Ledger
    from tp_invariant_recipes.observe.ledger_callback import LedgerCallback
    from tp_invariant_recipes.patch_mode import invariant
    from tp_invariant_recipes.runs.run import Run

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("audit", "bisect", "certify", "compare", "score", "train", "verify"), "api.commands"),
    "Ledger": "ledger.view",
    "Run": "runs.run",
    **dict.fromkeys(("pretrain", "recipe"), "api.megatron"),
    **dict.fromkeys(
        ("CheckpointError", "ConfigError", "DataError", "HardwareFault", "Interrupted", "LedgerError", "RunError",
         "TpiError"), "errors"),
    "Engine": "features.rollouts.engine",
    **dict.fromkeys(("Completion", "Request", "Sampling"), "features.rollouts.requests"),
    "LedgerCallback": "observe.ledger_callback",
    "invariant": "patch_mode",
}  # fmt: skip
__all__ = [
    "CheckpointError", "Completion", "ConfigError", "DataError", "Engine", "HardwareFault", "Interrupted", "Ledger",
    "LedgerCallback", "LedgerError", "Request", "Run", "RunError", "Sampling", "TpiError", "audit", "bisect",
    "certify", "compare", "invariant", "pretrain", "recipe", "score", "train", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LedgerCallback":  # a class of Bridge's
        import_module(f"{__name__}.start.bridge").load()
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
