"""What a node does for the others while its ranks train: say that it lives, hear who failed, bring files."""

import time
from collections.abc import Callable
from typing import Any

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.launch.plan import Plan
from tp_invariant_recipes.multinode.forwarding import Receiver, Sender
from tp_invariant_recipes.multinode.rendezvous import Rendezvous
from tp_invariant_recipes.runs import attempts

ROUND = 1.0  # seconds between looks at the other nodes
LOST = 60.0  # seconds without a sign of life after which a node counts as lost


class PeerFailed(Exception):
    """Another node has failed, and says why itself."""


class Superseded(Exception):
    """SLURM took this job for dead and started it elsewhere, while its processes went on here."""


class Heartbeat:
    """Call it often while ranks live, and until all nodes have ended."""

    def __init__(self, meeting: Rendezvous, planned: Plan, files: Sender | Receiver | None) -> None:
        """files: what brings files from node to node; None where all nodes share them."""
        self.meeting, self.run_dir, self.files = meeting, planned.run_dir, files
        self.show: Callable[[], None] = lambda: None
        self.attempts = len(attempts.read_attempts(self.run_dir))
        self.rounds = 0
        self.looked = 0.0
        self.signs: dict[int, tuple[Any, float]] = {}  # of each other node, the last and when it was seen

    def __call__(self) -> None:
        """Show progress; once a second, look at the others.

        Raises PeerFailed, Superseded, and RunError when a node is lost.
        """
        self.show()
        if time.monotonic() - self.looked >= ROUND:
            self.look()
            self.looked = time.monotonic()

    def look(self) -> None:
        """Look at the others now. Raises as a call does."""
        place = self.meeting.place
        self.rounds += 1
        self.meeting.set(f"alive/{place.number}", round=self.rounds)
        if self.files:
            self.files()
        if self.meeting.has("failing"):
            raise PeerFailed
        if place.first:
            if len(attempts.read_attempts(self.run_dir)) != self.attempts:
                raise Superseded
            for number in range(1, place.count):
                self._look_for(number)

    def _look_for(self, number: int) -> None:
        sign = self.meeting.get(f"alive/{number}")
        last, seen = self.signs.get(number, (None, time.monotonic()))
        self.signs[number] = (sign, seen if sign == last and number in self.signs else time.monotonic())
        if time.monotonic() - self.signs[number][1] > LOST:
            name = (self.meeting.get(f"arrived/{number}") or {}).get("name", f"node {number}")
            raise RunError(f"{name} of {self.meeting.place.names} has given no sign of life for {LOST:.0f} s")
