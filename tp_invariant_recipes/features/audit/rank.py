# SPDX-License-Identifier: Apache-2.0
"""One rank of an audit: the audited run, or the reference and its dithered repetitions in this one process."""

import os

from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.runs.sweep_dir import AuditedRun
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import rank


def measure(run_dir: RunDir, rank_info: rank.RankInfo) -> None:
    """Train what the run directory holds, once for every pass of its task, and record what it computes."""
    run = AuditedRun(run_dir.path)
    config, described, task = run.read_run_config(), run.read_run(RunFile), run.read_task()
    bridge.load()
    from tp_invariant_recipes.features.audit.recording import AuditRecording
    from tp_invariant_recipes.observe.recorder import recording
    from tp_invariant_recipes.training.settle import settle

    for number in range(task.passes):
        os.environ.update(rank_info.environment(number))
        own = run.dithered(number) if number else run
        own.path.mkdir(parents=True, exist_ok=True)
        follow = None if task.follow is None else run.path / task.follow
        audited = AuditRecording(own.path, range(task.first, task.last + 1), number or None, follow)
        callbacks = [*recording(own, rank_info, described, config.ledger), audited]
        with rank.closing(callbacks):
            rank.pretrain(config, callbacks)
        if number + 1 < task.passes:
            settle()


def train_and_record(run_dir: RunDir, rank_info: rank.RankInfo) -> None:
    """Train what the run directory holds as `tpi train` does, and record the state before the task's first step."""
    from tp_invariant_recipes.features.train import rank as training

    run = AuditedRun(run_dir.path)
    bridge.load()
    from tp_invariant_recipes.features.audit.resume_recording import ResumeRecording

    training.train(run_dir, rank_info, [ResumeRecording(run, run.read_task().first)])
