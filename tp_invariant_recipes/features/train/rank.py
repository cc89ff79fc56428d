# SPDX-License-Identifier: Apache-2.0
"""One rank of a training: its callbacks, composed."""

from collections.abc import Callable, Sequence
from typing import Any

from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import finetuning
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import experiments, rank


def train(
    run_dir: RunDir, rank_info: rank.RankInfo, callbacks: Sequence[Any] = (), forward_step: Callable | None = None
) -> None:
    """Build the configuration that the run directory holds and train it.

    callbacks: of a program of one's own, called before ours. forward_step: as of `rank.pretrain`.
    """
    config, run = run_dir.read_run_config(), run_dir.read_run(RunFile)
    bridge.load()
    from tp_invariant_recipes.config.fingerprint import experts_separate, optimizer_state
    from tp_invariant_recipes.observe.recorder import recording
    from tp_invariant_recipes.training.callbacks import IndexRecorder, ManifestWriter

    parts = run.identity_hash, run.layout, optimizer_state(config)
    separate = experts_separate(config.numerics.mode, config.model, run.layout)
    manifest: list = [ManifestWriter(*parts, separate_experts=separate, first=rank_info.rank == 0)]
    if rank_info.rank == 0 and (folder := finetuning.index_folder(config)):
        manifest.append(IndexRecorder(folder))
    last = rank_info.rank == rank_info.world_size - 1
    verdict = [experiments.Verdict(run_dir, config)] if last else []
    recorded = recording(run_dir, rank_info, run, config.ledger)
    composed = [*callbacks, *[*recorded, *guarding(run_dir, rank_info, config), *manifest, *verdict]]
    with rank.closing(composed), experiments.continued(config, run_dir):
        rank.pretrain(config, composed, forward_step)


def guarding(run_dir: RunDir, rank_info: rank.RankInfo, config: RunConfig) -> list:
    """Return the callback that notices silent data corruption, if the run has one. It comes after those of
    `recording`."""
    from tp_invariant_recipes.check.recording import OFF

    if config.guard.kind == OFF:
        return []
    from tp_invariant_recipes.features.guard.callback import Guard

    return [Guard(config, run_dir, rank_info.rank)]
