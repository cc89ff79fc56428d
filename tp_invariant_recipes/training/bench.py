"""The story of one rank of a benchmark: every pass in turn, in this one process."""

import gc
import os

from tp_invariant_recipes.host import bridge
from tp_invariant_recipes.training import rank
from tp_invariant_recipes.training.benchdir import BenchDir, Pass
from tp_invariant_recipes.training.rundir import RunDir


def measure(run_dir: RunDir, seat: rank.Seat) -> None:
    """Train every pass of the benchmark that the directory holds and write down this rank's figures."""
    bench_dir = BenchDir(run_dir.path)
    bridge.load()
    for number, one in enumerate(bench_dir.read_passes()):
        os.environ.update(seat.environment(number))
        tree = bench_dir.mode(one.mode).read_config()
        tree["train"]["train_iters"] = one.steps
        rank.pretrain(tree, _callbacks(bench_dir, seat, number, one, tree["device"]["kind"]))
        _settle()


def _callbacks(bench_dir: BenchDir, seat: rank.Seat, number: int, one: Pass, device: str) -> list:
    from tp_invariant_recipes.training.stopwatch import Stopwatch, Tracer

    callbacks: list = [Stopwatch(bench_dir.figures(seat.rank), number, one)]
    if one.profile and seat.rank == 0:
        callbacks.append(Tracer(bench_dir.trace(one.mode), one, gpu=device == "gpu"))
    return callbacks


def _settle() -> None:
    """Leave the next pass the memory that this one used: models hold themselves in cycles, and Bridge stops the
    collector."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
