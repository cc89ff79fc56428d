# SPDX-License-Identifier: Apache-2.0
"""The callbacks that write a ledger."""

from typing import TYPE_CHECKING

from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.sections import LedgerSettings

if TYPE_CHECKING:
    from tp_invariant_recipes.training.rank import RankInfo


def recording(run_dir: RunDir, rank_info: "RankInfo", run: RunFile, ledger: LedgerSettings) -> list:
    """Return the callbacks that write the ledger of a run directory, on this rank. Bridge is loaded."""
    from tp_invariant_recipes.check.recording import steps
    from tp_invariant_recipes.observe.digests.callback import Digests
    from tp_invariant_recipes.observe.recorder import Recorder
    from tp_invariant_recipes.observe.trace import Tracing

    traced = steps(ledger.trace) if ledger.trace else ()
    digests = Digests(ledger.digests, ledger.state_digests, traced, ledger.experts) if ledger.digests else None
    tracing = Tracing(traced, ledger.dump, run_dir) if traced else None
    callbacks: list = [callback for callback in (digests, tracing) if callback]
    if rank_info.rank == rank_info.world_size - 1:
        parts = {"numerics": run.numerics, "layout": run.layout, "notes": run.notes}
        callbacks.append(Recorder(run_dir, run.identity, parts, digests, tracing))
    return callbacks
