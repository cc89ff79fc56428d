"""Ledger, progress and logs of nodes that share no files: brought to the first node while ranks write them."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.ledger.record import put_aside
from tp_invariant_recipes.multinode.rendezvous import Rendezvous
from tp_invariant_recipes.reading import Count, Record, checked, parse_json
from tp_invariant_recipes.runs.run_dir import RunDir

CHUNK = 1 << 20  # bytes
FILES = re.compile(r"ledger\.jsonl|progress\.jsonl|logs/[\w-]+\.log")  # all that is sent, and all that is accepted


@dataclass(frozen=True)
class _Head(Record):
    """The first line of a message; the bytes follow."""

    file: str
    position: Count


@dataclass
class Sender:
    """Sends the text that ranks append to the files of this node's run directory. Make it before they start.

    Without shared files no run is resumed, so every attempt has a ledger of its own.
    """

    rendezvous: Rendezvous
    run_dir: RunDir
    sent: int = 0
    positions: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _put_aside(self.run_dir.ledger)
        self.positions = {file: file.stat().st_size for file in self._files()}

    def __call__(self) -> None:
        """Send the text written since the last call."""
        for file in self._files():
            position = self.positions.get(file, 0)
            with file.open("rb") as stream:
                stream.seek(position)
                while data := stream.read(CHUNK):
                    head = _Head(str(file.relative_to(self.run_dir.path)), position).as_json()
                    key = f"bytes/{self.rendezvous.node.number}/{self.sent}"
                    self.rendezvous.send(key, json.dumps(head).encode() + b"\n" + data)
                    self.sent += 1
                    position += len(data)
            self.positions[file] = position

    def _files(self) -> list[Path]:
        run_dir = self.run_dir
        return [f for f in (run_dir.ledger, run_dir.progress, *sorted(run_dir.logs.glob("rank-*.log"))) if f.exists()]


@dataclass
class Receiver:
    """On the first node, writes the others' messages into its own run directory."""

    rendezvous: Rendezvous
    run_dir: RunDir
    taken: dict[int, int] = field(default_factory=dict)

    def __call__(self) -> None:
        """Write the messages since the last call. Raises RunError for a message that no Sender sends."""
        for number in range(1, self.rendezvous.node.count):
            while (message := self.rendezvous.take(f"bytes/{number}/{self.taken.get(number, 0)}")) is not None:
                self.taken[number] = self.taken.get(number, 0) + 1
                self._write(message)

    def _write(self, message: bytes) -> None:
        first, _, data = message.partition(b"\n")
        try:
            head = checked(_Head, parse_json(first))
        except ValueError as error:
            raise RunError(f"a process at this job's rendezvous sends what no node of it sends: {error}") from error
        if not FILES.fullmatch(head.file):
            raise RunError(f"a process at this job's rendezvous sends {head.file}, which no node of it sends")
        file = self.run_dir.path / head.file
        file.parent.mkdir(parents=True, exist_ok=True)
        if file == self.run_dir.ledger and head.position == 0:
            _put_aside(file)
        with file.open("ab") as stream:
            stream.write(data)


def _put_aside(ledger: Path) -> None:
    """Keep the ledger of an earlier attempt beside the one to come."""
    if ledger.exists():
        put_aside(ledger, ledger.read_bytes())
        ledger.unlink()
