"""Where the nodes of a job meet: one process each, joined by a TCP store that the first of them holds.

What is said there is a JSON object under a key. Nodes are numbered as SLURM numbers the tasks of
a step with one task a node.
"""

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.host.quiet import quiet
from tp_invariant_recipes.launch.ranks import Stop

PORTS = range(20_000, 32_000)  # below those that Linux gives away; which one, the job's id says
POLL = 0.1  # seconds between looks for a word that is waited for
ANSWER = 30  # seconds that the first node may take to answer


class Stopped(Exception):
    """A signal asked to stop before training began."""


@dataclass(frozen=True)
class NodeInfo:
    """This node among those of a job's step.

    job:     its id. restart: how often SLURM has started it again.
    number:  of this node; 0 is the first. count: of nodes. name: of this one; names: of all, as SLURM writes them.
    address: of the first, as the others reach it.
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
        """Of the meeting. Every node knows it without being told; two jobs of one node have different ones."""
        return PORTS[int(self.job) % len(PORTS)]


def node_info(environment: Mapping[str, str]) -> NodeInfo | None:
    """This process's place by the variables that srun sets; None outside of a step. Raises RunError.

    RunError: the step has more than one task on a node.
    """
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
    """The first name of a list as SLURM writes it: n[03-05,7],m1 is n03."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", names)
    return "".join(part or "" for part in found.groups()) if found else names


def _address(name: str, launcher: str) -> str:
    """The first node's address: that of its name or, where names are not known, of the host that srun ran on."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return launcher


class Rendezvous:
    """The meeting, joined. Its methods raise RunError when the first node is gone."""

    def __init__(self, place: NodeInfo, stop: Stop, patience: float) -> None:
        """Join, waiting up to `patience` seconds for the first node; on that one, open the meeting. Raises RunError."""
        from datetime import timedelta

        from torch.distributed import DistError, TCPStore

        self.place, self.stop = place, stop
        self._lost: type[Exception] = DistError
        wait = timedelta(seconds=patience)
        host = "127.0.0.1" if place.first else place.address
        try:
            with quiet():  # c10d warns of every address that has no name
                self.store = TCPStore(host, place.port, is_master=place.first, wait_for_workers=False, timeout=wait)
        except DistError as error:
            raise RunError(self._not_joined(patience, error)) from error
        self.store.set_timeout(timedelta(seconds=ANSWER))

    def _not_joined(self, patience: float, error: Exception) -> str:
        if self.place.first:
            return f"{self.place.name} cannot open port {self.place.port}, where nodes are to meet: {error}"
        return (
            f"{self.place.name} did not reach the first of {self.place.names} at {self.place.address}, port "
            f"{self.place.port}, within {patience:.0f} s: it has not started, or a firewall is between them "
            f"(slurm.rendezvous_timeout=SECONDS waits longer)"
        )

    def set(self, key: str, **facts: Any) -> None:
        """Put a word down for all."""
        self._asked(lambda: self.store.set(key, json.dumps(facts)))

    def has(self, key: str) -> bool:
        """Whether anything has been said under a key."""
        return self._asked(lambda: self.store.check([key]))

    def get(self, key: str) -> dict[str, Any] | None:
        """What has been said under a key so far."""
        return self._asked(lambda: json.loads(self.store.get(key)) if self.store.check([key]) else None)

    def wait(self, key: str, patience: float) -> dict[str, Any]:
        """Wait for a word without asking for it again and again; RunError after `patience` seconds."""
        from datetime import timedelta

        self._asked(lambda: self.store.wait([key], timedelta(seconds=patience)))
        return json.loads(self._asked(lambda: self.store.get(key)))

    def send(self, key: str, data: bytes) -> None:
        """Put bytes down, to be taken by one."""
        self._asked(lambda: self.store.set(key, data))  # type: ignore[arg-type] # takes bytes, too

    def take(self, key: str) -> bytes | None:
        """Take the bytes away that lie under a key; None: there are none."""

        def taken() -> bytes | None:
            if not self.store.check([key]):
                return None
            data = self.store.get(key)
            self.store.delete_key(key)
            return data

        return self._asked(taken)

    def _asked(self, question: Any) -> Any:
        try:
            return question()
        except self._lost as error:
            raise RunError(f"the first of {self.place.names} does not answer {self.place.name} any more") from error
