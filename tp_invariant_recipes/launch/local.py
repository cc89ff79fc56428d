# SPDX-License-Identifier: Apache-2.0
"""All ranks of a run on this machine."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tp_invariant_recipes.launch import ranks
from tp_invariant_recipes.launch.ranks import Outcome, RankFailed, RankFn, Stop
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.settings import environment, low_precision
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.training.heartbeat import limits

if TYPE_CHECKING:
    from tp_invariant_recipes.launch.plan import Plan  # it imports Hydra, which an export does without

# Takes the name of a training and its plan, and shows its progress.
Watch = Callable[[str, "Plan"], AbstractContextManager[Callable[[], None]]]


def run(
    plan: "Plan",
    tick: Callable[[], None],
    *,
    rank_fn: RankFn,
    process_groups: int = 1,
    stop: Stop | None = None,
) -> Outcome:
    """Run all ranks to their end.

    Raises RunError naming the rank that died or hangs, its log and its last words; LockLost.

    tick:           called about ten times a second while ranks live.
    rank_fn:        what each rank does, a function of a module.
    process_groups: how many the ranks form in turn.
    stop:           of a caller that notes signals itself. Default: they are noted while the ranks live, and Ctrl-C is
                    raised as KeyboardInterrupt once all ranks have ended.
    """

    def watch() -> None:
        tick()
        lock.check()

    with environment.applied(plan.environment):
        bridge.load()  # where a recipe was composed from the cache, nothing has imported it
        if plan.device == "cpu" and (arithmetic := plan.config.numerics.arithmetic) is not None:
            arithmetic.require_machine(None, fp8=low_precision.adds_fp8(plan.config))  # forked ranks know the answer
        stores = [store() for _ in range(process_groups)]
        ports = tuple(store.port for store in stores)
        prepare_environment("lo")
        with ranks.stopping() if stop is None else nullcontext(stop) as noted:
            try:
                outcome = ranks.run(
                    plan.run_dir,
                    plan.device,
                    _rank_infos(plan.layout.world, ports),
                    watch,
                    noted,
                    rank_fn=rank_fn,
                    limits=limits(plan.config),
                )
            except RankFailed as error:
                if stop is None and noted.interrupted:  # a rank may fail of the signal
                    raise KeyboardInterrupt from error
                raise
    if stop is None and noted.interrupted:
        raise KeyboardInterrupt
    return outcome


def _rank_infos(world: int, ports: tuple[int, ...]) -> list[Any]:
    """Return a rank a GPU. Tests put two on one."""
    from tp_invariant_recipes.training.rank import RankInfo

    return [RankInfo(rank, rank, world, world, "127.0.0.1", ports) for rank in range(world)]


def store(*, nodes: int = 1) -> Any:
    """Where ranks meet. Held by this process, as torchrun's agent does, so that the port is ours from the start.

    nodes: with more than one it listens on all interfaces. A TCPStore would always do so.
    """
    from torch.distributed import TCPStore

    here = "127.0.0.1"
    listening = socket.create_server(("" if nodes > 1 else here, 0))
    port = listening.getsockname()[1]
    return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def prepare_environment(interface: str | None) -> None:
    """Variables that ranks inherit, where they are not set. interface: through which Gloo reaches other ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks share the processor
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # Gloo would look the host's name up; it may not resolve
