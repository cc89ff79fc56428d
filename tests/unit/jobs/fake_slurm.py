# SPDX-License-Identifier: Apache-2.0
"""SLURM's commands played by scripts on PATH, and a submission with what its jobs would write.

Each call of squeue is a scene: its rows, and before them whatever changes in the run directory meanwhile. The last
scene stays.
"""

import json
import os
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.commands_on_path import CommandsOnPath

NOTICE = "Maintenance|on|Monday at 12:00"  # sites print such lines on standard output
SQUEUE = r"""
n=$(( $(cat {folder}/number) + 1 ))
if [[ -e {folder}/scene-$n ]]; then echo "$n" >{folder}/number; else n=$((n - 1)); fi
echo "{notice}"
. {folder}/scene-$n
"""
SACCT = r"""
echo "{notice}"
cat {folder}/accounts 2>/dev/null || {{ echo "Slurm accounting storage is disabled" >&2; exit 1; }}
"""
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def row(job: str, state: str, reason: str = "None", remaining: str = "9:00", nodes: str = "n1") -> str:
    """A row of squeue's; job: "12", or "12_3" of an array."""
    array, _, task = job.partition("_")
    return "|".join(("tpi", array, task or "N/A", state, remaining, nodes, reason))


class Slurm(CommandsOnPath):
    """SLURM's commands on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.scenes = 0
        (folder / "number").write_text("0")
        for name, body in {"squeue": SQUEUE, "sacct": SACCT, "scancel": ""}.items():
            self.put(name, body.format(folder=folder, notice=NOTICE))

    def scene(self, *rows: str, before: str = "", away: bool = False) -> None:
        """The next answer of squeue. before: shell commands that run first. away: the controller does not answer."""
        self.scenes += 1
        lines = [before, AWAY if away else "", *(f"echo {shlex.quote(row)}" for row in rows), "true"]
        (self.folder / f"scene-{self.scenes}").write_text("\n".join(lines))

    def accounts(self, *rows: str) -> None:
        """What sacct says; without, no accounts are kept."""
        (self.folder / "accounts").write_text("".join(f"{row}\n" for row in rows))


@dataclass
class Made:
    """A submission as `tpi submit` leaves it, and what its jobs would write."""

    directory: Path
    files: dict[str, str] = field(default_factory=dict)

    def attempt(self, cell: str = "", **facts: object) -> str:
        """Shell commands that add an attempt to `run.json`; `cell`: of this one."""
        run = self.directory / cell / "run.json"
        attempts = json.loads(self.files.get(str(run), '{"attempts": []}'))["attempts"]
        whole = {"from_step": 0, "to_step": 20, "job": {"id": "12", "restart": 0, "nodes": "n1"}, "outcome": None}
        attempts = [*attempts, whole | {"why": None, "requeued": False} | facts]
        self.files[str(run)] = json.dumps({"attempts": attempts})
        return self.put(run, self.files[str(run)])

    def end(self, cell: str = "", **facts: object) -> str:
        """Shell commands that end the last attempt."""
        run = self.directory / cell / "run.json"
        whole = json.loads(self.files[str(run)])
        whole["attempts"][-1] |= facts
        self.files[str(run)] = json.dumps(whole)
        return self.put(run, self.files[str(run)])

    def steps(self, count: int, cell: str = "", torn: str = "") -> str:
        """Shell commands that write a progress file; torn: a line that is not whole."""
        lines = [json.dumps({"step": n, "loss": 5 - n / 10, "tokens": 64, "seconds": 0.5}) for n in range(1, count + 1)]
        return self.put(self.directory / cell / "progress.jsonl", "\n".join(lines) + "\n" + torn)

    @staticmethod
    def put(file: Path, text: str) -> str:
        return f"mkdir -p {shlex.quote(str(file.parent))}; printf %s {shlex.quote(text)} >{shlex.quote(str(file))}"


def now(commands: str) -> None:
    """Run shell commands at once."""
    assert os.system(commands) == 0


def age(directory: Path, seconds: float = 2 * 24 * 3600) -> None:
    """Make all files of a directory older."""
    for file in directory.rglob("*"):
        os.utime(file, (time.time() - seconds,) * 2)
