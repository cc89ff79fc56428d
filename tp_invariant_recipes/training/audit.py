"""One rank of an audit's training."""

from typing import Any

from tp_invariant_recipes.host import bridge
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.audit_dir import AuditedRun
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.training import rank


def measure(run_dir: RunDir, rank_info: rank.RankInfo) -> None:
    """Train what the run directory holds and write down the gradient norms of every step."""
    run = AuditedRun(run_dir.path)
    config, described = run.read_run_config(), run.read_run(RunFile)
    bridge.load()
    callbacks = [*rank.recording(run, rank_info, described, config.ledger), *_callbacks(run, rank_info)]
    try:
        rank.pretrain(config, callbacks)
    finally:
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()


def _callbacks(run: AuditedRun, rank_info: rank.RankInfo) -> list[Any]:
    from tp_invariant_recipes.training.gradient_norms import GradientNorms, Rounded

    rounded_from = run.read_task().rounded_from
    norms = GradientNorms(run.norms if rank_info.rank == 0 else None)
    return [norms] if rounded_from is None else [norms, Rounded(rounded_from)]
