"""Trainings side by side, each on GPUs of its own, all forked from one process that has imported Megatron-Bridge.

    python -m tests.gpu.side_by_side FOLDER < RUNS      # a JSON list of the fields of `Run`

trains every run in FOLDER and prints one line of JSON: the name of each run and what went wrong with it, or null.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.forks import Process, Tpi, end_with_parent
from tp_invariant_recipes.config import environment
from tp_invariant_recipes.host import bridge, gpus
from tp_invariant_recipes.launch import ranks

TAIL = 3000  # characters of a failed run's messages


@dataclass(frozen=True)
class Run:
    """`tpi train WORDS run.dir=NAME`.

    after:   runs that must have ended well before. resumes: one of them, of whose directory this run takes a copy to go
             on with.
    """

    name: str
    words: str
    gpus: int
    after: tuple[str, ...] = ()
    resumes: str | None = None

    def arguments(self) -> list[str]:
        """The command line of tpi."""
        if self.resumes is not None:
            return ["train", "--resume", self.name, *self.words.split()]
        return ["train", *self.words.split(), f"run.dir={self.name}"]


def gpus_for(words: str) -> int:
    """How many GPUs a run with these overrides needs."""
    degrees = {"tp": 1, "pp": 1, "dp": 1}
    for name, _, value in (word.partition("=") for word in words.split()):
        if name in degrees:
            degrees[name] = int(value)
    return degrees["tp"] * degrees["pp"] * degrees["dp"]


def train(folder: Path, runs: Iterable[Run]) -> dict[str, str | None]:
    """Train the runs in `folder`, in a process of their own. returns: of each what went wrong, None for nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.side_by_side", str(folder)],
        input=json.dumps([asdict(run) for run in runs]),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr.splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


def train_all(folder: Path, runs: list[Run], names: list[str], before: Callable[[], None]) -> dict[str, str | None]:
    """Start every run as soon as enough GPUs are free and the runs before it have ended.

    names: of the GPUs. before: run in the new process of each run first.
    """
    tpi, free = Tpi(folder), list(names)
    waiting = sorted(runs, key=lambda run: -run.gpus)
    going: dict[str, tuple[Process, list[str]]] = {}
    ended: dict[str, str | None] = {}
    while waiting or going:
        before_this = len(waiting)
        for run in list(waiting):
            if failed := [name for name in run.after if ended.get(name)]:
                waiting.remove(run)
                ended[run.name] = f"{failed[0]} failed before"
            elif run.gpus <= len(free) and all(name in ended for name in run.after):
                waiting.remove(run)
                mine, free = free[: run.gpus], free[run.gpus :]
                if run.resumes is not None:
                    shutil.copytree(folder / run.resumes, folder / run.name)
                going[run.name] = tpi.start(*run.arguments(), before=_on(mine, before)), mine
        assert going or len(waiting) < before_this, f"{[run.name for run in waiting]} can never start"
        for name, (process, mine) in list(going.items()):
            if process.poll() is not None:
                ended[name] = None if process.status == 0 else f"status {process.status}\n{process.stderr[-TAIL:]}"
                free += mine
                del going[name]
        time.sleep(0.05)
    return ended


def _on(mine: list[str], before: Callable[[], None]) -> Callable[[], None]:
    def planted() -> None:
        end_with_parent()
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        before()

    return planted


def _ranks_are_forked() -> None:
    ranks.START_METHODS["gpu"] = "fork"


def _a_fork_can_use_cuda() -> bool:
    """Not if an import has started CUDA here. Then each rank imports Megatron-Bridge itself, which takes longer."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = int(torch.ones(1, device="cuda").item() != 1)
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    """See the top."""
    runs = [Run(**fields) for fields in json.load(sys.stdin)]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(len(gpus.visible()))] if chosen is None else chosen.split(",")
    os.environ.update(environment.settings("gpu", os.environ))
    bridge.load()
    before = _ranks_are_forked if _a_fork_can_use_cuda() else lambda: None
    began = time.monotonic()
    found = train_all(Path(sys.argv[1]), runs, names, before)
    how = "forked" if before is _ranks_are_forked else "spawned"
    print(f"{len(runs)} runs, ranks {how}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
