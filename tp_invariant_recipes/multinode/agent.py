# SPDX-License-Identifier: Apache-2.0
"""One node of a job: join the rendezvous, agree on the run, run this node's ranks, end with the other nodes.

The first node decides from which step the run starts, whether all nodes would compute the same, and whether the job is
queued again. The keys of the rendezvous, in the order in which nodes set them:

    open       the first node, as it opens the rendezvous
    orders     the first node: the step to start from, and what must be equal on all nodes
    arrived/N  node N: it has planned the same run, or why it cannot
    next       the first node: the port where the ranks of all nodes meet; None: the run is over
    ended/N    node N: its ranks have ended; if they failed: why, since when, and where they stand if some hang
    failing    any node, after a failure: the others end their ranks, and first say where they stand if some hang
    over       the first node, at any time: how the run ended
    left/N     node N, last
"""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tp_invariant_recipes.check.hosts.job import misfits
from tp_invariant_recipes.config.compose import Composed
from tp_invariant_recipes.errors import ConfigError, RunError, TpiError, lines, refuse
from tp_invariant_recipes.launch import local, ranks, record, resume, train
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import Failure, Outcome, RankFailed, Stop
from tp_invariant_recipes.launch.record import RunRequest
from tp_invariant_recipes.ledger.run_files import RestartJob
from tp_invariant_recipes.machine.processor import address_towards, interface
from tp_invariant_recipes.machine.versions import versions
from tp_invariant_recipes.multinode.rendezvous import (
    FAILED,
    POLL,
    Agreed,
    Arrived,
    Heartbeat,
    NodeInfo,
    Orders,
    Over,
    PeerFailed,
    Rendezvous,
    Stopped,
)
from tp_invariant_recipes.runs import checkpoints, restarts
from tp_invariant_recipes.runs.lock import LockLost, locked
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import environment, run_config
from tp_invariant_recipes.training.heartbeat import limits

START_TIMEOUT = 600.0  # seconds that the first node may take to start its ranks once all nodes have arrived
END_TIMEOUT = 10.0  # seconds for the other nodes to report their end after a failure, and to leave after "over"

Watch = Callable[[Plan], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class NodeTask:
    """The command that every node runs.

    request, composed: the run, which each node plans.
    watch:   on the first node, shows the progress.
    remark:  on the first node, shows a line.
    """

    request: RunRequest
    composed: Composed
    run_dir: RunDir
    watch: Watch
    remark: Callable[[str], None]

    @classmethod
    def of(cls, request: RunRequest, watch: Watch, remark: Callable[[str], None]) -> "NodeTask":
        """Compose the run. Raises ConfigError."""
        composed = request.composed()
        refuse(lines(misfits(composed.config)))
        where = request.resume or composed.config.run.dir
        if where is None:
            raise ConfigError("launcher=slurm: each node would choose a run directory of its own; set run.dir=PATH")
        return cls(request, composed, RunDir(Path(where).expanduser()), watch, remark)


def run(node: NodeInfo, task: NodeTask, stop: Stop) -> Over:
    """Do this node's part of the run; returns when the run has ended on all nodes.

    stop: from `ranks.stopping`, which counts signals in it. Raises RunError when the first node cannot be reached.
    """
    from tp_invariant_recipes.start import bridge

    os.environ.update(environment.of_run(task.composed.config))  # before torch is imported
    bridge.load()  # now, while the other nodes do the same
    rendezvous = Rendezvous(node, task.run_dir.path, stop, task.composed.config.slurm.rendezvous_timeout)
    return _run_first_node(rendezvous, task) if node.first else _run_other_node(rendezvous, task)


# The first node


def _run_first_node(rendezvous: Rendezvous, task: NodeTask) -> Over:
    """Hold the run directory's lock for all nodes, until they have left."""
    with closing(rendezvous), ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(task.run_dir, nodes=rendezvous.node.count))
            if lock.remark:
                task.remark(lock.remark)
            ended = _plan_and_train(rendezvous, task)
        except TpiError as error:
            ended = Over(None, why=str(error))
        rendezvous.set("over", ended)
        rendezvous.set("next", None)
        _wait_for_others(rendezvous, "left", END_TIMEOUT)
    return ended


def _plan_and_train(rendezvous: Rendezvous, task: NodeTask) -> Over:
    """Raise a TpiError when another attempt would fail for the same reason."""
    run_dir, node = task.run_dir, rendezvous.node
    job = RestartJob(node.job, node.restart, node.names)
    try:
        planned = task.request.plan(task.composed)
        allocated = run_config.allocation_of(planned.config)
        if allocated.nodes != node.count:
            raise ConfigError(
                f"this run takes {allocated}, and srun started it on "
                f"{node.count}: srun --nodes={allocated.nodes}, or change cluster.ranks_per_node or the layout"
            )
    except TpiError as error:
        with suppress(TpiError):  # where there is no run directory yet, the reason is in the job's log only
            restarts.refused(run_dir, str(error), job)
        raise
    if planned.completed:
        task.remark(resume.completed_text(planned))
        run_dir.write_text(run_dir.ended, f"{Outcome.COMPLETED.value}\n")
        return Over("completed")
    mine = [attempt for attempt in restarts.read_restarts(run_dir) if attempt.job and attempt.job.id == node.job]
    run_dir.ended.unlink(missing_ok=True)
    record.write(planned, job=job)
    try:
        ended = _attempt(rendezvous, task, planned, restarts.consecutive_failures(mine, planned.start) + 1)
    except LockLost:
        raise
    except TpiError as error:
        ended = Over(None, why=str(error))
    with suppress(TpiError):  # mostly a full disk, which the run's own error names
        restarts.end(run_dir, ended.outcome or FAILED, ended.why, requeued=ended.requeued)
        run_dir.write_text(run_dir.ended, f"{ended.word}\n")
    return ended


def _attempt(rendezvous: Rendezvous, task: NodeTask, planned: Plan, number: int) -> Over:
    """Make one attempt. number: counts this job's attempts from the same step. Raises as `_plan_and_train`."""
    slurm = planned.config.slurm
    tries = slurm.tries
    if number > tries:
        raise RunError(
            f"{tries} starts in a row began at step {planned.start}, and none reached another checkpoint; no more "
            f"(slurm.tries={tries})"
        )
    train.validate(planned)
    try:
        rendezvous.set("orders", Orders(planned.start, _must_agree(planned)))
        train.check_checkpoint(planned, rendezvous.node.number, rendezvous.node.count)  # while the others do
        reached = _wait_for_arrivals(rendezvous, slurm.rendezvous_timeout)
        checkpoints.quarantine(planned.run_dir.checkpoints, after=planned.start)
        checkpoints.settle(planned.run_dir)
        outcome = _train(rendezvous, task, planned, reached)
    except Stopped:
        outcome = Outcome.STOPPED
    except RunError as error:
        # A rank may fail because of the signal that stops it; then the run must not restart by itself.
        retry = number < tries and not rendezvous.stop.requests
        if isinstance(error, RankFailed):
            retry &= _excluded(planned, error.failure) or not error.failure.user_error
        more = "it is queued again" if retry else "no more"
        return Over(None, retry, f"{error}\n(start {number} of {tries} from step {planned.start}; {more})")
    return Over("completed") if outcome is Outcome.COMPLETED else Over("stopped", rendezvous.stop.resumable)


def _excluded(planned: Plan, failure: Failure) -> bool:
    """Whether the job goes on without the nodes that have computed corrupted values: its script then excludes them."""
    noted = checkpoints.settle(planned.run_dir)
    if not (failure.hardware and noted and planned.config.guard.exclude):
        return False
    file = planned.run_dir.excluded
    before = file.read_text(encoding="utf-8").split() if file.exists() else []
    planned.run_dir.write_text(file, "".join(f"{host}\n" for host in dict.fromkeys([*before, *noted.hosts])))
    return True


def _wait_for_arrivals(rendezvous: Rendezvous, patience: float) -> str | None:
    """Return the address at which others reached this node; None: there are none. TpiError: one cannot take part."""
    node = rendezvous.node
    arrived = _wait_for_others(rendezvous, "arrived", patience, rendezvous.check_stop)
    missing = node.count - 1 - len(arrived)
    if missing:
        here = ", ".join([node.name, *(arrival.name for arrival in arrived)])
        raise RunError(
            f"{missing} of the nodes {node.names} did not come within {patience:.0f} s; here: {here}. Their lines in "
            f"the job's log say why, if they started at all (slurm.rendezvous_timeout=SECONDS waits longer)"
        )
    problems = [problem for arrival in arrived for problem in arrival.problems]
    refuse(problems)
    return arrived[0].reached if arrived else None


def _train(rendezvous: Rendezvous, task: NodeTask, planned: Plan, reached: str | None) -> Outcome:
    store = local.store(nodes=rendezvous.node.count)
    through = interface(reached) if reached else "lo"
    try:
        with task.watch(planned) as show:
            heartbeat = Heartbeat(rendezvous, show)
            start_others = partial(rendezvous.set, "next", store.port)
            outcome = _run_ranks(rendezvous, planned, "127.0.0.1", store.port, through, heartbeat, start_others)
            ended = _wait_for_others(rendezvous, "ended", None, heartbeat)
            show()
        if any(isinstance(failure, Failure) for failure in ended):
            raise PeerFailed
    except (RunError, PeerFailed) as error:
        raise _first_cause(rendezvous, planned.run_dir, error) from error
    return train.check_completed(planned, outcome)


def _first_cause(rendezvous: Rendezvous, run_dir: RunDir, error: Exception) -> RankFailed:
    """Get the failure that caused those of all nodes; if none failed, which ranks of all nodes hang; else `error`."""
    _set_failing(rendezvous, hang=False)
    ended = [rendezvous.get("ended/0"), *_wait_for_others(rendezvous, "ended", END_TIMEOUT)]
    failures = [failure for failure in ended if isinstance(failure, Failure)]
    if dead := [failure for failure in failures if not failure.rank_states]:
        # As of one machine's ranks: one that was killed without a word, or else broken hardware, causes the others'.
        first = min(dead, key=lambda failure: (failure.cause > 0, not failure.hardware, failure.cause))
        where = f"\n(on {first.node})" if rendezvous.node.count > 1 else ""
        return RankFailed(replace(first, why=f"{first.why}{where}"))
    if failures:
        return ranks.hanging([state for failure in failures for state in failure.rank_states], run_dir)
    return RankFailed(Failure(str(error), time.time()))


# The other nodes


def _run_other_node(rendezvous: Rendezvous, task: NodeTask) -> Over:
    with suppress(Stopped, PeerFailed, RankFailed):
        planned = _plan_as_ordered(rendezvous, task)
        # One blocking wait, no polling: the first node forks its ranks now, and its store's thread must have no work.
        if planned and (port := rendezvous.wait("next", START_TIMEOUT)):
            heartbeat = Heartbeat(rendezvous)
            address = rendezvous.node.address
            _run_ranks(rendezvous, planned, address, port, interface(address_towards(address)), heartbeat)
            _poll(partial(rendezvous.get, "over"), heartbeat)
    over: Over = _poll(partial(rendezvous.get, "over"))
    rendezvous.set(f"left/{rendezvous.node.number}")
    return over


def _plan_as_ordered(rendezvous: Rendezvous, task: NodeTask) -> Plan | None:
    """Plan from "orders" and set "arrived". None: this node cannot take part, or the run is over."""
    orders = _poll(lambda: rendezvous.get("over") or rendezvous.get("orders"), rendezvous.check_stop)
    if isinstance(orders, Over):
        return None
    node = rendezvous.node
    problems: list[str] = []
    try:
        planned = task.request.plan(task.composed, start=orders.start)
        problems += _differences(orders.agreed, _must_agree(planned), node)
        train.validate(planned)
        train.check_checkpoint(planned, node.number, node.count)
    except TpiError as error:
        problems.append(f"{node.name}: {error}")
    rendezvous.set(f"arrived/{node.number}", Arrived(node.name, tuple(problems), node.address))
    return None if problems else planned


def _must_agree(planned: Plan) -> Agreed:
    return Agreed(planned.identity, planned.environment, versions())


def _differences(first_node: Agreed, this_node: Agreed, node: NodeInfo) -> list[str]:
    return [
        f"{node.name} has another {part}: {key} is {here.get(key)}, and {there.get(key)} on the first of {node.names}"
        for part, here in vars(this_node).items()
        for there in (getattr(first_node, part),)
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]


# All nodes


def _run_ranks(
    rendezvous: Rendezvous,
    planned: Plan,
    address: str,
    port: int,
    interface: str | None,
    heartbeat: Heartbeat,
    started: Callable[[], None] | None = None,
) -> Outcome:
    """Run this node's ranks; tell the others how they ended. Raises RankFailed, and what `heartbeat` raises.

    address, port: of the store where all ranks meet. interface: the one through which Gloo reaches the other nodes.
    """
    from tp_invariant_recipes.features.train import rank as train
    from tp_invariant_recipes.training.rank import RankInfo

    node, count = rendezvous.node, run_config.allocation_of(planned.config).ranks
    os.environ.update(planned.environment)
    local.prepare_environment(interface)
    first = node.number * count
    rank_infos = [RankInfo(first + n, n, planned.layout.world, count, address, (port,)) for n in range(count)]
    ended: Failure | bool = True
    try:
        return ranks.run(
            planned.run_dir,
            planned.device,
            rank_infos,
            heartbeat,
            rendezvous.stop,
            rank_fn=train.train,
            started=started,
            limits=limits(planned.config),
        )
    except RankFailed as error:
        rank_states = tuple(replace(state, node=node.name) for state in error.failure.rank_states)
        ended = replace(error.failure, node=node.name, rank_states=rank_states)
        raise
    finally:
        rendezvous.set(f"ended/{node.number}", ended)
        if isinstance(ended, Failure):
            _set_failing(rendezvous, hang=bool(ended.rank_states))


def _set_failing(rendezvous: Rendezvous, *, hang: bool) -> None:
    """Have the other nodes end their ranks, unless a node has done so. hang: they first say where theirs stand."""
    if rendezvous.get("failing") is None:
        rendezvous.set("failing", hang)


def _wait_for_others(
    rendezvous: Rendezvous, key: str, patience: float | None, tick: Callable[[], None] = lambda: None
) -> list[Any]:
    """Wait until each other node has set its key; return the values.

    patience: seconds; None: as long as `tick` raises nothing. Nobody waits again for a node that was too late once.
    """
    keys = {number: f"{key}/{number}" for number in rendezvous.others}
    if (values := _poll(partial(rendezvous.get_all, [*keys.values()]), tick, patience)) is not None:
        return values
    there = {number: value for number, key in keys.items() if (value := rendezvous.get(key)) is not None}
    rendezvous.others = [*there]
    return [*there.values()]


def _poll(look: Callable[[], Any], tick: Callable[[], None] = lambda: None, patience: float | None = None) -> Any:
    """Look until there is a value, and return it; None: there was none for `patience` seconds."""
    deadline = float("inf") if patience is None else time.monotonic() + patience
    while (value := look()) is None and time.monotonic() < deadline:
        tick()
        time.sleep(POLL)
    return value
