"""The story of one node of a job: meet the others, agree on the run, start this node's ranks, end it together.

The first node decides: from which step, whether all nodes would compute the same, and what becomes of the job. What is
said at the meeting, in this order: "joined/N" by each other node; "orders" by the first; "arrived/N" by each other;
"next" by the first (the port where ranks meet, or that it is over); each node "ended/N" when its ranks have ended,
"failed/N" and "failing" before it if they failed; "over" by the first, at any time; "left/N" by each other.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from tp_invariant_recipes.config import allocation
from tp_invariant_recipes.errors import ConfigError, RunError, TpiError, listed
from tp_invariant_recipes.host.network import address_towards, interface
from tp_invariant_recipes.host.versions import versions
from tp_invariant_recipes.launch import local, plan, ranks, train
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.launch.ranks import Outcome, RankFailed, Stop
from tp_invariant_recipes.multinode.forwarding import Receiver, Sender
from tp_invariant_recipes.multinode.heartbeat import Heartbeat, PeerFailed, Superseded
from tp_invariant_recipes.multinode.rendezvous import POLL, NodeInfo, Rendezvous, Stopped
from tp_invariant_recipes.runs import attempts, checkpoints
from tp_invariant_recipes.runs.run_dir import RunDir

NEXT = 600.0  # seconds that the first may take to start its ranks when all nodes are there
LAST_WORDS = 10.0  # seconds that nodes get to say how they ended after one has failed, and to leave when all is said

# What the job's script reads in `RunDir.ended`, besides an outcome's own word.
FAILED = "failed"
REQUEUE = "requeue"


@dataclass(frozen=True)
class NodeTask:
    """What the command, the same on every node, asks for.

    run_dir:     of the run.
    environment: variables to set before torch is imported.
    lead:        plans the run, on the first node.
    follow:      plans it on the others, from the step that the first has chosen.
    rendezvous_timeout: seconds to wait for the others.
    tries:       how many attempts of one job in a row may come to nothing.
    watch:       on the first node, shows the progress.
    """

    run_dir: RunDir
    environment: dict[str, str]
    lead: Callable[[], Plan]
    follow: Callable[[int], Plan]
    rendezvous_timeout: int
    tries: int
    watch: Callable[[Plan], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True)
class Ended:
    """How the run ended, as the first node has said. outcome: None: it failed, and `why` says of what."""

    outcome: Outcome | None
    requeued: bool = False
    why: str | None = None

    @property
    def word(self) -> str:
        """For the job's script."""
        return REQUEUE if self.requeued else self.outcome.value if self.outcome else FAILED


class _Over(Exception):
    """The first node has ended the run while another word was waited for."""


def run(place: NodeInfo, asked: NodeTask, stop: Stop) -> Ended:
    """Do this node's part of the run, to the end of the whole.

    stop: of `ranks.stopping`, which notes signals for it. Raises RunError when the others cannot be reached, or not any
    more.
    """
    from tp_invariant_recipes.host import bridge

    os.environ.update(asked.environment)
    bridge.load()  # now, while the other nodes do the same
    meeting = Rendezvous(place, stop, asked.rendezvous_timeout)
    return _lead(meeting, asked) if place.first else _follow(meeting, asked)


# The first node


def _lead(meeting: Rendezvous, asked: NodeTask) -> Ended:
    try:
        ended = _led(meeting, asked)
    except TpiError as error:
        ended = Ended(None, why=str(error))
    except Superseded:
        ended = Ended(None, why="SLURM has started this job elsewhere: this try ends and leaves the run to the other")
    meeting.set("over", outcome=ended.outcome and ended.outcome.value, requeued=ended.requeued, why=ended.why)
    meeting.set("next", port=None)
    _others(meeting, "joined", LAST_WORDS)
    _others(meeting, "left", LAST_WORDS)
    return ended


def _led(meeting: Rendezvous, asked: NodeTask) -> Ended:
    """Raises a TpiError when there is nothing to try again."""
    run_dir, place = asked.run_dir, meeting.place
    job = {"id": place.job, "restart": place.restart, "nodes": place.names}
    try:
        planned = _without_shared_files(asked.lead())
        _fits(planned, place)
    except TpiError as error:
        with suppress(TpiError):  # where it is no run directory yet, the job's log has to do
            attempts.refused(run_dir, str(error), job)
        raise
    mine = [attempt for attempt in attempts.read_attempts(run_dir) if (attempt.get("job") or {}).get("id") == place.job]
    run_dir.ended.unlink(missing_ok=True)
    plan.write(planned, job=job)
    try:
        ended = _tried(meeting, asked, planned, attempts.consecutive_failures(mine, planned.start) + 1)
    except TpiError as error:
        ended = Ended(None, why=str(error))
    with suppress(TpiError):  # a full disk, mostly: then the run's own error says so
        word = ended.outcome.value if ended.outcome else FAILED
        attempts.end(run_dir, word, ended.why, requeued=ended.requeued)
        run_dir.write_text(run_dir.ended, f"{ended.word}\n")
    return ended


def _tried(meeting: Rendezvous, asked: NodeTask, planned: Plan, number: int) -> Ended:
    """number: of this try among those of this job that began at the same step. Raises as `_led`."""
    if number > asked.tries:
        raise RunError(
            f"{asked.tries} tries in a row began at step {planned.start}, and none reached another checkpoint; no more "
            f"(slurm.tries={asked.tries})"
        )
    train.check(planned)
    if planned.run_dir.checkpoints.exists():
        checkpoints.set_aside(planned.run_dir.checkpoints, after=planned.start)
    try:
        with _announced(meeting, planned):
            reached = _all_arrived(meeting, asked.rendezvous_timeout)
        outcome = _trained(meeting, asked, planned, reached)
    except Stopped:
        outcome = Outcome.STOPPED
    except (RunError, PeerFailed) as error:
        cause = _first_cause(meeting, error)
        again = number < asked.tries and not cause.ours
        more = "it is queued again" if again else "no more"
        return Ended(None, again, f"{cause}\n(try {number} of {asked.tries} from step {planned.start}; {more})")
    return Ended(outcome, outcome is Outcome.STOPPED and meeting.stop.resumable)


@contextmanager
def _announced(meeting: Rendezvous, planned: Plan) -> Iterator[None]:
    """Give orders; a file in the run directory meanwhile shows the other nodes whether they see the same one."""
    word, run_dir = secrets.token_hex(8), planned.run_dir
    run_dir.write_text(run_dir.token, word)
    meeting.set("orders", start=planned.start, token=word, agreed=_agreed(planned))
    try:
        yield
    finally:
        run_dir.token.unlink(missing_ok=True)


def _all_arrived(meeting: Rendezvous, patience: float) -> str | None:
    """The address at which the others found this node; None where there is no other.

    Raises RunError when one does not come, ConfigError when one cannot take part.
    """
    place = meeting.place
    arrived = _others(meeting, "arrived", patience, stoppable=True)
    missing = place.count - 1 - len(arrived)
    if missing:
        here = ", ".join([place.name, *(one["name"] for one in arrived)])
        raise RunError(
            f"{missing} of the nodes {place.names} did not come within {patience:.0f} s; here: {here}. Their lines in "
            f"the job's log say why, if they started at all (slurm.rendezvous_timeout=SECONDS waits longer)"
        )
    problems = [problem for one in arrived for problem in one["problems"]]
    if problems:
        raise ConfigError(listed(problems), problems)
    return arrived[0]["reached"] if arrived else None


def _trained(meeting: Rendezvous, asked: NodeTask, planned: Plan, reached: str | None) -> Outcome:
    store = local.store()
    together = Heartbeat(meeting, planned, Receiver(meeting, planned.run_dir))
    through = interface(reached) if reached else "lo"

    def started() -> None:
        meeting.set("next", port=store.port)

    with asked.watch(planned) as together.show:
        outcome = _ranks(meeting, planned, "127.0.0.1", store.port, through, together, started)
        _others(meeting, "ended", None, tick=together)
        together.look()  # the others' last files
        together.show()
    return outcome


def _first_cause(meeting: Rendezvous, error: Exception) -> RankFailed:
    """Of all that failed on any node, what failed first; `error` where no rank did."""
    meeting.set("failing")
    _others(meeting, "ended", LAST_WORDS)
    has = [meeting.get(f"failed/{number}") for number in range(meeting.place.count)]
    first = min((one for one in has if one), key=lambda one: one["cause"], default=None)
    if first is None:
        return RankFailed(str(error), time.time())
    where = f"\n(on {first['name']})" if meeting.place.count > 1 else ""
    return RankFailed(f"{first['why']}{where}", first["cause"], ours=first["ours"])


# The other nodes


def _follow(meeting: Rendezvous, asked: NodeTask) -> Ended:
    meeting.set(f"joined/{meeting.place.number}")
    try:
        planned, shared = _joined(meeting, asked)
        # Not asked for again and again: the first forks its ranks now, while no thread of its store has work to do.
        port = meeting.wait("next", NEXT)["port"]
        if port is None:
            raise _Over
        if not shared:
            plan.write(planned, job={"id": meeting.place.job})
        together = Heartbeat(meeting, planned, None if shared else Sender(meeting, planned.run_dir))
        address = meeting.place.address
        _ranks(meeting, planned, address, port, interface(address_towards(address)), together)
        over = _told(meeting, "over", tick=together)
    except (_Over, Stopped, PeerFailed, RankFailed):
        over = _told(meeting, "over")
    meeting.set(f"left/{meeting.place.number}")
    return Ended(Outcome(over["outcome"]) if over["outcome"] else None, over["requeued"], over["why"])


def _joined(meeting: Rendezvous, asked: NodeTask) -> tuple[Plan, bool]:
    """Plan as ordered and say so. Returns the plan, and whether this node shares the run directory with the first.

    Raises _Over when this node cannot take part.
    """
    orders, place = _told(meeting, "orders", stoppable=True), meeting.place
    problems: list[str] = []
    try:
        planned = _without_shared_files(asked.follow(orders["start"]))
        token = planned.run_dir.token
        shared = token.exists() and token.read_text(encoding="utf-8") == orders["token"]
        if not shared and planned.config.cluster.shared_files:
            problems.append(
                f"{place.name} does not see the files of {planned.run_dir.path} that the first of {place.names} wrote: "
                f"set run.dir to a directory that all nodes share, or cluster.shared_files=false"
            )
        problems += _differences(orders["agreed"], _agreed(planned), place)
        train.check(planned)
    except TpiError as error:
        problems.append(f"{place.name}: {error}")
    meeting.set(f"arrived/{place.number}", name=place.name, problems=problems, reached=place.address)
    if problems:
        raise _Over
    return planned, shared


def _agreed(planned: Plan) -> dict[str, dict[str, Any]]:
    """What must be the same on all nodes, or they would not compute the same."""
    return {"identity": planned.identity, "environment": planned.environment, "versions": versions()}


def _differences(theirs: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]], place: NodeInfo) -> list[str]:
    return [
        f"{place.name} has another {part}: {key} is {ours[part].get(key)}, and {theirs[part].get(key)} on the first of "
        f"{place.names}"
        for part in theirs
        for key in sorted({*theirs[part], *ours[part]})
        if theirs[part].get(key) != ours[part].get(key)
    ]


# All nodes


def _fits(planned: Plan, place: NodeInfo) -> None:
    taken = allocation.of(planned.config)
    if taken.nodes != place.count:
        raise ConfigError(
            f"this run takes {taken}, and srun started it on "
            f"{place.count}: srun --nodes={taken.nodes}, or change cluster.ranks_per_node or the layout"
        )


def _without_shared_files(planned: Plan) -> Plan:
    """Where nodes share no files, what they would share otherwise is not written.

    A checkpoint whose files lie on several disks can never be read again. And Megatron's first rank writes the indices
    of a dataset for all others to read, unless the path of their cache is empty but not None: then each makes its own
    (megatron/core/datasets/gpt_dataset.py, `not path_to_cache or …`).
    """
    if planned.config.cluster.shared_files:
        return planned
    changes = {"checkpoint": {"save": None}, "dataset": {"path_to_cache": ""}}
    sections = {name: planned.tree[name] | change for name, change in changes.items()}
    return replace(planned, tree=planned.tree | sections)


def _ranks(
    meeting: Rendezvous,
    planned: Plan,
    address: str,
    port: int,
    interface: str | None,
    together: Heartbeat,
    started: Callable[[], None] | None = None,
) -> Outcome:
    """Run this node's ranks; tell the others how they ended. Raises RankFailed, and what `together` raises.

    address, port: of the store where all ranks meet. interface: through which Gloo reaches the other nodes.
    """
    from tp_invariant_recipes.training.rank import RankInfo

    place, count = meeting.place, allocation.of(planned.config).ranks
    os.environ.update(planned.environment)
    local.prepare_environment(interface)
    first = place.number * count
    seats = [RankInfo(first + n, n, planned.layout.world, count, address, (port,)) for n in range(count)]
    try:
        return ranks.run(planned.run_dir, planned.device, seats, together, meeting.stop, started=started)
    except RankFailed as error:
        facts = {"cause": error.cause, "why": str(error), "ours": error.ours}
        meeting.set(f"failed/{place.number}", name=place.name, **facts)
        meeting.set("failing")
        raise
    finally:
        if together.files:
            together.files()
        meeting.set(f"ended/{place.number}")


def _told(
    meeting: Rendezvous, key: str, *, tick: Callable[[], None] | None = None, stoppable: bool = False
) -> dict[str, Any]:
    """Wait for a word of the first node's. Raises _Over when it ends the run instead, Stopped when a signal comes."""
    while (found := meeting.get(key)) is None:
        if meeting.has("over"):
            raise _Over
        if stoppable and meeting.stop.asked:
            raise Stopped
        if tick:
            tick()
        time.sleep(POLL)
    return found


def _others(
    meeting: Rendezvous,
    key: str,
    patience: float | None,
    *,
    tick: Callable[[], None] | None = None,
    stoppable: bool = False,
) -> list[dict[str, Any]]:
    """Wait until each other node has said its word, up to `patience` seconds; None: as long as `tick` raises nothing.

    Of a node that never joined no later word is waited for. Returns what has been said. Raises Stopped when a signal
    comes.
    """
    deadline = None if patience is None else time.monotonic() + patience
    numbers: Iterable[int] = range(1, meeting.place.count)
    if key not in ("joined", "arrived"):
        numbers = [number for number in numbers if meeting.has(f"joined/{number}")]
    keys = [f"{key}/{number}" for number in numbers]
    while True:
        has = [word for one in keys if (word := meeting.get(one)) is not None]
        if len(has) == len(keys) or (deadline is not None and time.monotonic() > deadline):
            return has
        if stoppable and meeting.stop.asked:
            raise Stopped
        if tick:
            tick()
        time.sleep(POLL)
