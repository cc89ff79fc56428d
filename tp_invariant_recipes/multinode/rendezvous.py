# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of a job's nodes: a TCP store on the first node, and one process a node that joins it.

Values are JSON under keys. Nodes have the numbers that SLURM gives the tasks of a step with one task a node.

Whoever reaches the port can read and set keys, and can list them. So each value carries a code that takes a secret: a
file in the run directory that only the run's user can read.
"""

import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch.ranks import Failure, PeersHang, Stop
from tp_invariant_recipes.ledger.run_files import Environment, Versions
from tp_invariant_recipes.reading import MIB, Bounds, Count, Listed, Record, checked, parse_json
from tp_invariant_recipes.runs import lock
from tp_invariant_recipes.runs.run_dir import writing
from tp_invariant_recipes.start.bridge import quiet

LARGEST = 16 * MIB  # bytes of a value

PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports; the job's id chooses one
POLL = 0.1  # seconds between two looks for a key
ANSWER = 30  # seconds that the first node may take to answer
VISIBLE = 60.0  # seconds after which a file of the first node is visible on the others, if they share the directory
MAC = 32  # bytes before each value
ROUND = 1.0  # seconds between two heartbeats
LOST = 60.0  # seconds without a heartbeat after which a node counts as lost
FAILED = "failed"


@dataclass(frozen=True)
class Agreed(Record):
    """Facts that must be equal on all nodes."""

    identity: dict[str, Any]
    environment: Environment
    versions: Versions


@dataclass(frozen=True)
class Orders(Record):
    """The first node's instructions to the others."""

    start: Count
    agreed: Agreed


@dataclass(frozen=True)
class Arrived(Record):
    """A node that has planned."""

    name: str
    problems: Listed[str]
    reached: str


@dataclass(frozen=True)
class Over(Record):
    """How the run ended, as the first node reports it. outcome: None: it failed, and `why` gives the reason."""

    outcome: Literal["completed", "stopped"] | None
    requeued: bool = False
    why: str | None = None

    @property
    def word(self) -> str:
        """For the job's script, which reads it in `RunDir.ended`."""
        return "requeue" if self.requeued else self.outcome or FAILED


# The first word of a key -> the type of its value; multinode/agent.py says who sets it.
VALUES: dict[str, Any] = {
    "open": Literal[True],
    "orders": Orders,
    "arrived": Arrived,
    "next": Annotated[int, Bounds(gt=0, lt=2**16)] | None,  # the port
    "ended": Failure | Literal[True],
    "failing": bool,  # whether ranks hang
    "over": Over,
    "left": Literal[True],
    "alive": Count,  # the number of the heartbeat
}


class Stopped(Exception):
    """A signal came before training began."""


@dataclass(frozen=True)
class NodeInfo:
    """This node among the nodes of a job's step.

    job:     the job's id. restart: how often SLURM has restarted the job.
    number:  this node's; 0 is the first. count: how many nodes there are.
    name:    this node's. names: those of all nodes, as SLURM writes them.
    address: where the other nodes reach the first.
    """

    job: str
    restart: int
    number: int
    count: int
    name: str
    names: str
    address: str

    @property
    def first(self) -> bool:
        """Whether this node decides for all."""
        return self.number == 0

    @property
    def port(self) -> int:
        """The rendezvous's, from the job's id: every node knows it, and two jobs on one node have different ones."""
        return PORTS[int(self.job) % len(PORTS)]


def node_info(environment: Mapping[str, str]) -> NodeInfo | None:
    """Return this process's node from srun's variables; None outside of a step. RunError: several tasks a node."""
    if "SLURM_STEP_ID" not in environment:
        return None
    names = environment["SLURM_STEP_NODELIST"]
    count, tasks = int(environment["SLURM_STEP_NUM_NODES"]), int(environment["SLURM_STEP_NUM_TASKS"])
    if count != tasks:
        raise RunError(
            f"srun started {tasks} tasks on {count} nodes; it must be one a node, which starts the ranks: "
            f"--ntasks-per-node=1"
        )
    return NodeInfo(
        job=environment["SLURM_JOB_ID"],
        restart=int(environment.get("SLURM_RESTART_COUNT", 0)),
        number=int(environment["SLURM_PROCID"]),
        count=count,
        name=environment.get("SLURMD_NODENAME", socket.gethostname()),
        names=names,
        address=_address(_first(names), environment["SLURM_LAUNCH_NODE_IPADDR"]),
    )


def _first(names: str) -> str:
    """Return the first name of a list as SLURM writes it: n[03-05,7],m1 is n03."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", names)
    return "".join(part or "" for part in match.groups()) if match else names


def _address(name: str, launcher: str) -> str:
    """Return the first node's address; where names are not known, the address of the host that srun ran on."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return launcher


def parse(key: str, data: bytes) -> Any:
    """Return the value of a key. RunError: no node sets it."""
    try:
        if len(data) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        return checked(VALUES[key.partition("/")[0]], parse_json(data))
    except ValueError as error:
        raise RunError(f"a process at this job's rendezvous sets {key} to what no node of it sets: {error}") from error


def read_secret(file: Path) -> bytes | None:
    """Return the first node's secret; None: it is not there, or another user than the run directory's could know it."""
    with suppress(OSError), file.open("rb") as stream:
        there = os.fstat(stream.fileno())
        if there.st_uid == file.parent.stat().st_uid and not there.st_mode & 0o077:
            return stream.read(MAC)
    return None


class Rendezvous:
    """The rendezvous, joined. Its methods raise RunError when the first node is gone, or another process sets a key."""

    def __init__(self, node: NodeInfo, run: Path, stop: Stop, patience: float) -> None:
        """Join; the first node opens the store, others wait up to `patience` seconds for it. Raises RunError.

        run: the run directory.
        """
        from datetime import timedelta

        from torch.distributed import DistError, TCPStore

        self.node, self.stop = node, stop
        self.others = [*range(1, node.count)]  # nodes that the first waits for
        self._lost: type[Exception] = DistError
        self._file = run / f".job-{node.job}-{node.restart}.secret"
        self._secret = self._new_secret() if node.first else b""
        wait = timedelta(seconds=patience)
        host = "127.0.0.1" if node.first else node.address
        try:
            with quiet():  # c10d warns of every address that has no name
                self.store = TCPStore(host, node.port, is_master=node.first, wait_for_workers=False, timeout=wait)
        except DistError as error:
            self.close()
            raise RunError(self._not_joined(patience, error)) from error
        self.store.set_timeout(timedelta(seconds=ANSWER))
        if node.first:
            self.set("open")
        else:
            self._find_secret(min(VISIBLE, patience))

    def _new_secret(self) -> bytes:
        with writing(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.unlink(missing_ok=True)
            with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secret := secrets.token_bytes(MAC))
        return secret

    def _find_secret(self, patience: float) -> None:
        """Read the secret by which the first node's first value has its code. A shared file may come late."""
        deadline, data = time.monotonic() + patience, self._ask(lambda: self.store.get("open"))
        while not ((secret := read_secret(self._file)) and self._is_signed("open", data, secret)):
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self.node.name} does not see in {self._file.parent} what the first of {self.node.names} wrote: "
                    f"set run.dir to a directory that all nodes share and that only you can write; or a process of "
                    f"another job holds port {self.node.port} of {self.node.address}"
                )
            time.sleep(POLL)
        self._secret = secret

    def close(self) -> None:
        """On the first node: remove the secret."""
        if self.node.first:
            self._file.unlink(missing_ok=True)

    def _code(self, key: str, text: bytes, secret: bytes) -> bytes:
        return hmac.digest(secret, key.encode() + b"\0" + text, "sha256")

    def _is_signed(self, key: str, data: bytes, secret: bytes) -> bool:
        return hmac.compare_digest(data[:MAC], self._code(key, data[MAC:], secret))

    def _value(self, key: str, data: bytes) -> Any:
        if not self._is_signed(key, data, self._secret):
            raise RunError(f"a process that is no node of this job sets {key} at its rendezvous")
        return parse(key, data[MAC:])

    def _not_joined(self, patience: float, error: Exception) -> str:
        if self.node.first:
            return f"{self.node.name} cannot open port {self.node.port}, where nodes are to meet: {error}"
        return (
            f"{self.node.name} did not reach the first of {self.node.names} at {self.node.address}, port "
            f"{self.node.port}, within {patience:.0f} s: it has not started, or a firewall is between them "
            f"(slurm.rendezvous_timeout=SECONDS waits longer)"
        )

    def set(self, key: str, value: Any = True) -> None:
        """Set a key, one of VALUES, that all nodes can read."""
        text = json.dumps(value.as_json() if isinstance(value, Record) else value).encode()
        self._ask(lambda: self.store.set(key, self._code(key, text, self._secret) + text))  # type: ignore[arg-type]

    def get(self, key: str) -> Any:
        """Return the value of a key; None: it is not set. RunError: no node sets such a value."""
        values = self.get_all([key])
        return values[0] if values else None

    def get_all(self, keys: list[str]) -> list[Any] | None:
        """Return the values of keys in one request; None: not all are set. RunError: as `get`."""
        there = self._ask(lambda: self.store.multi_get(keys) if self.store.check(keys) else None) if keys else []
        return None if there is None else [self._value(key, data) for key, data in zip(keys, there, strict=True)]

    def wait(self, key: str, patience: float) -> Any:
        """Return the value of a key, after one blocking wait without polling; RunError after `patience` seconds."""
        from datetime import timedelta

        self._ask(lambda: self.store.wait([key], timedelta(seconds=patience)))
        return self._value(key, self._ask(lambda: self.store.get(key)))

    def check_stop(self) -> None:
        """Raise Stopped."""
        if self.stop.signals:
            raise Stopped

    def _ask(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except self._lost as error:
            raise RunError(f"the first of {self.node.names} does not answer {self.node.name} any more") from error


class PeerFailed(Exception):
    """Another node has failed; it reports the reason itself."""


class PeerHangs(PeerFailed, PeersHang):
    """Ranks of another node hang, or wait for ranks that do: maybe for some here."""


class Heartbeat:
    """Sends a node's heartbeats and notices failures of others: called while ranks live, until all nodes have ended."""

    def __init__(self, rendezvous: Rendezvous, show: Callable[[], None] = lambda: None) -> None:
        """show: shows the progress."""
        self.rendezvous, self.show = rendezvous, show
        self.rounds = 0
        self.looked = 0.0
        self.signs: dict[int, tuple[Any, float]] = {}  # by node: the last heartbeat and when it was first seen

    def __call__(self) -> None:
        """Show progress; once a second, look at the others.

        Raises PeerFailed, RunError when a node is lost, and LockLost when SLURM has started this job elsewhere.
        """
        self.show()
        if time.monotonic() - self.looked >= ROUND:
            self.look()
            self.looked = time.monotonic()

    def look(self) -> None:
        """Look at the others now. Raises as a call does."""
        node = self.rendezvous.node
        self.rounds += 1
        self.rendezvous.set(f"alive/{node.number}", self.rounds)
        if (failing := self.rendezvous.get("failing")) is not None:
            raise PeerHangs if failing else PeerFailed
        lock.check()
        if node.first:
            keys = [f"alive/{number}" for number in self.rendezvous.others]
            signs = self.rendezvous.get_all(keys) or map(self.rendezvous.get, keys)  # until all have given one
            for number, sign in zip(self.rendezvous.others, signs, strict=True):
                last, since = self.signs.get(number, (None, 0.0))
                if sign != last or number not in self.signs:
                    self.signs[number] = (sign, time.monotonic())
                elif time.monotonic() - since > LOST:
                    arrived = self.rendezvous.get(f"arrived/{number}")
                    name = arrived.name if arrived else f"node {number}"
                    raise RunError(f"{name} of {node.names} has sent no heartbeat for {LOST:.0f} s")
