"""Ranks that stay alive between the runs of one command: a run then starts without processes and imports of its own.

    with WarmRanks() as warm:
        train.execute(first, watch, warm=warm)      starts ranks
        train.execute(second, watch, warm=warm)     the same ranks, if the second run could not tell

Ranks train another run if it has the same layout, device and environment variables. After each run they put back what
it has changed in their process (training/process_state.py). Ranks that cannot put it back end, and the next run starts
others. Runs that a row of COLD names have ranks of their own, and after a run that failed or was stopped all ranks end.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.config.relations import EXPERIMENTS
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import cuda_graphs, layout, low_precision
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.training.heartbeat import Heartbeats, Phase

if TYPE_CHECKING:
    from tp_invariant_recipes.training.rank import RankInfo

MOST = 2  # layouts whose ranks are alive at once: `tpi bisect` takes turns between two
PATIENCE = 60.0  # seconds that a rank gets to tidy up after a run, and to end

# Sections of the configuration that start threads and processes.
SERVICES = ("ft", "inprocess_restart", "nvrx_straggler", "profiling", "straggler", "tensor_inspect")

# Whether a run needs ranks of its own, and what it leaves in a process.
COLD: tuple[tuple[Callable[[RunConfig], bool], str], ...] = (
    (
        lambda c: c.device.kind == "gpu" and layout.of(c).world > 1,
        "no ranks with NCCL have been seen to give a second run the bits of a run of its own",
    ),
    (lambda c: cuda_graphs.asked_for(c.model), "libraries keep parts of a CUDA graph"),
    (low_precision.enabled, "Transformer Engine keeps the scales of FP8 and FP4 tensors"),
    (lambda c: c.logging.kind in EXPERIMENTS, "wandb, mlflow and comet_ml have one run a process"),
    (lambda c: any(c.bridge.get(name) for name in SERVICES), "threads and processes stay"),
)


def may_stay(config: RunConfig) -> bool:
    """Whether the ranks of this run may train another one after it, and have trained one before."""
    return not any(needs_own(config) for needs_own, _ in COLD)


@dataclass
class Member:
    """One rank in one run. It looks like a process that ends when the run does."""

    process: Any
    heartbeats: Heartbeats
    index: int

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        """None while the rank trains; 0 once it is done, whether or not the process lives."""
        if self.process.exitcode is not None:
            return self.process.exitcode
        return 0 if self._done() else None

    def is_alive(self) -> bool:
        """Whether the rank trains."""
        return self.process.is_alive() and not self._done()

    def _done(self) -> bool:
        return self.heartbeats[self.index].phase is Phase.DONE


@dataclass
class Crew:
    """The ranks of one layout, and the launcher's end of the connection to each. used: in how many runs."""

    processes: list[Any]
    connections: list[Any]
    heartbeats: Heartbeats
    used: int = 0

    @property
    def members(self) -> list[Member]:
        """The ranks, in the present run."""
        return [Member(process, self.heartbeats, n) for n, process in enumerate(self.processes)]

    def ready(self) -> bool:
        """Whether all ranks have tidied up after their last run and stay."""
        try:
            stay = all(one.poll(PATIENCE) and one.recv() is True for one in self.connections)
        except (EOFError, OSError):
            return False
        return stay and all(process.is_alive() for process in self.processes)  # killed since, perhaps

    def assign(self, run_dir: RunDir, rank_infos: Sequence["RankInfo"], rank_fn: Any) -> None:
        """Have each rank train this run. Raises OSError: one has died. Ranks hold the locks that this process holds."""
        # What the launcher has locked before the ranks were started they have from there.
        descriptors = lock.Inherited().descriptors if self.used else []
        for n, connection in enumerate(self.connections):
            self.heartbeats.sign(n, Phase.STARTING, 0)
            connection.send((str(run_dir.path), rank_infos[n], rank_fn, len(descriptors)))
            for descriptor in descriptors:
                reduction.send_handle(connection, descriptor, self.processes[n].pid)
        self.used += 1

    def end(self) -> None:
        """End the processes, whatever they do."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE)


class WarmRanks:
    """The ranks that are alive, by what a run must share to be trained by them. At the end of the block they end."""

    def __init__(self) -> None:
        self._crews: dict[Any, Crew] = {}

    def __enter__(self) -> "WarmRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def crew(self, shared: Any, start: Callable[[], Crew]) -> Crew:
        """Ranks for a run that is about to start: those of an earlier one, or new ones.

        shared: what their runs have in common, beside the environment variables that a new process would inherit now.
        start:  starts new ranks.
        """
        key = (shared, frozenset(os.environ.items()))
        crew = self._crews.pop(key, None)
        if crew is not None and not crew.ready():
            crew.end()
            crew = None
        while len(self._crews) >= MOST:
            self._crews.pop(next(iter(self._crews))).end()
        self._crews[key] = crew or start()
        return self._crews[key]

    def end(self) -> None:
        """End all ranks."""
        while self._crews:
            self._crews.popitem()[1].end()
