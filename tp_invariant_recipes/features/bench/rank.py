"""One rank of a benchmark: every pass in turn, in this one process."""

import os

from tp_invariant_recipes.features.train import rank as train
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.observe.recording import recording
from tp_invariant_recipes.runs.bench_dir import BenchDir, Pass
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training import rank


def measure(run_dir: RunDir, rank_info: rank.RankInfo) -> None:
    """Train every pass of the benchmark that the directory holds and write down this rank's figures."""
    bench_dir = BenchDir(run_dir.path)
    bridge.load()
    from tp_invariant_recipes.training.settle import settle

    for number, bench_pass in enumerate(bench_dir.read_passes()):
        os.environ.update(rank_info.environment(number))
        config = bench_dir.mode(bench_pass.mode).read_run_config().with_fields("train", train_iters=bench_pass.steps)
        rank.pretrain(config, _callbacks(bench_dir, rank_info, number, bench_pass, config))
        settle()


def _callbacks(bench_dir: BenchDir, rank_info: rank.RankInfo, number: int, bench_pass: Pass, config: RunConfig) -> list:
    from tp_invariant_recipes.features.bench.stopwatch import Start, Stopwatch, Tracer

    # A ledger as every run has; what its callbacks take counts.
    run_dir = bench_dir.recorded(number)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    start = Start()
    recorded = recording(run_dir, rank_info, bench_dir.mode(bench_pass.mode).read_run(RunFile), config.ledger)
    guard = train.guarding(run_dir, rank_info, config)
    callbacks = [start, *recorded, *guard, Stopwatch(start, bench_dir.figures(rank_info.rank), number, bench_pass)]
    if bench_pass.profile and rank_info.rank == 0:
        callbacks.append(Tracer(bench_dir.trace(bench_pass.mode), bench_pass, gpu=config.device.kind == "gpu"))
    return callbacks
