"""While its ranks train, a node sends heartbeats and notices failures of other nodes."""

import time
from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch.ranks import PeersHang
from tp_invariant_recipes.multinode.rendezvous import Rendezvous
from tp_invariant_recipes.runs import lock

ROUND = 1.0  # seconds between two heartbeats
LOST = 60.0  # seconds without a heartbeat after which a node counts as lost


class PeerFailed(Exception):
    """Another node has failed; it reports the reason itself."""


class PeerHangs(PeerFailed, PeersHang):
    """Ranks of another node hang, or wait for ranks that do: maybe for some here."""


class Heartbeat:
    """Call it often while ranks live, and until all nodes have ended."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.show: Callable[[], None] = lambda: None
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
            others = range(1, node.count)
            keys = [f"alive/{number}" for number in others]
            signs = self.rendezvous.get_all(keys) or map(self.rendezvous.get, keys)  # until all have given one
            for number, sign in zip(others, signs, strict=True):
                self._note(number, sign)

    def _note(self, number: int, sign: Any) -> None:
        if number not in self.signs or self.signs[number][0] != sign:
            self.signs[number] = (sign, time.monotonic())
        if time.monotonic() - self.signs[number][1] > LOST:
            arrived = self.rendezvous.get(f"arrived/{number}")
            name = arrived.name if arrived else f"node {number}"
            raise RunError(f"{name} of {self.rendezvous.node.names} has given no sign of life for {LOST:.0f} s")
