# SPDX-License-Identifier: Apache-2.0
"""Trainings side by side, several to a GPU, all forked from one process that has imported Megatron-Bridge.

A run of more ranks than there are GPUs has two to a GPU, and Gloo in place of NCCL, which allows one.

    python -m tests.gpu.side_by_side FOLDER < RUNS      # a JSON list of the fields of `Run`

trains every run in FOLDER and prints one line of JSON: the name of each run and what went wrong with it, or null.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.forks import Process, Tpi, end_with_parent
from tp_invariant_recipes.launch import local, ranks
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.settings import environment
from tp_invariant_recipes.start import bridge
from tp_invariant_recipes.start.forking import can_fork

TAIL = 3000  # characters of a failed run's messages
SLOTS = 4  # ranks to a GPU: these runs wait for the host
SHARED = 2  # ranks of one run to a GPU
LIMIT = 240  # seconds for one run
SHARING = "device.peer_memory=never"  # a run that comes later would make a step of this one take minutes
NCCL = (
    "pp=", "guard=shadow", "cuda_graph=full", "cuda_graph=te", "use_megatron_fsdp",
)  # Gloo cannot send nor be captured, and FSDP has a distributed optimizer  # fmt: skip
# A distributed optimizer's gathering of weights on GPUs by Gloo ends in a segmentation fault (torch 2.11).
WITH_GLOO = (
    "dist.distributed_backend=gloo",
    "optimizer.use_distributed_optimizer=false",
    "ddp.overlap_param_gather=false",
    "optimizer.overlap_param_gather=false",
)
# A small model with experts, of sizes that all kernels take; iters and gbs are to be added.
EXPERTS = (
    "qwen3_moe_toy seq=128 model.num_layers=2 model.hidden_size=256 model.num_attention_heads=8 "
    "model.num_query_groups=8 model.kv_channels=32 model.ffn_hidden_size=256 model.moe_ffn_hidden_size=128 "
    "model.vocab_size=512"
)


def folder_of(name: str) -> str:
    """The run directory's name for the name of a run in a test."""
    return name.replace(" ", "-").replace("=", "")


@dataclass(frozen=True)
class Run:
    """`tpi train WORDS run.dir=NAME`; or `tpi score …` and `tpi generate …` where the words begin so.

    after:   runs that must have ended well before. resumes: one of them, of whose directory this run takes a copy to go
             on with.
    margin:  of the slots for experts in its graphs; below 1 the first step in one lacks slots. None: the usual one.
    """

    name: str
    words: str
    gpus: int
    after: tuple[str, ...] = ()
    resumes: str | None = None
    margin: float | None = None

    def arguments(self) -> list[str]:
        """The command line of tpi."""
        if self.scores:
            return self.words.split()
        if self.resumes is not None:
            return ["train", "--resume", self.name, *self.words.split()]
        return ["train", *self.words.split(), f"run.dir={self.name}"]

    @property
    def scores(self) -> bool:
        """Whether it trains nothing."""
        return self.words.startswith(("score ", "generate "))

    def fits(self, gpus: int) -> bool:
        """Whether it can be trained on that many."""
        return self.gpus <= gpus or (self.gpus <= SHARED * gpus and not any(word in self.words for word in NCCL))


def gpus_for(words: str) -> int:
    """How many GPUs a run with these overrides needs."""
    degrees = {"tp": 1, "pp": 1, "cp": 1, "dp": 1}
    for name, _, value in (word.partition("=") for word in words.split()):
        if name in degrees:
            degrees[name] = int(value)
    return math.prod(degrees.values())


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


@dataclass(frozen=True)
class Trained:
    """Runs that have been trained in a folder, for the tests of a file. ended: of each what went wrong."""

    folder: Path
    ended: dict[str, str | None]

    @classmethod
    def where_they_fit(cls, folder: Path, runs: Iterable[Run]) -> "Trained":
        """Train those of the runs for which there are GPUs enough, as for the runs before them."""
        runs, here = list(runs), torch.cuda.device_count()
        fit = {run.name for run in runs if run.fits(here)}
        return cls(folder, train(folder, [run for run in runs if fit.issuperset((run.name, *run.after))]))

    def __call__(self, name: str) -> Path:
        """What a run has written. It skips the test where it needs more GPUs, and fails it where the run has failed."""
        if name not in self.ended:
            pytest.skip(f"needs more than {torch.cuda.device_count()} GPUs")
        assert self.ended[name] is None, self.ended[name]
        return self.folder / name

    def ledger(self, name: str) -> tuple:
        """The header and the steps of a training that a test names so."""
        ledger = read(self(folder_of(name)))
        return ledger.header, list(ledger.steps)


def marks() -> list[pytest.MarkDecorator]:
    """Of a file whose runs are trained so."""
    alone = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU")
    return [pytest.mark.gpu, alone, pytest.mark.timeout(900)]


def train_all(folder: Path, runs: list[Run], names: list[str], before: Callable[[], None]) -> dict[str, str | None]:
    """Start every run as soon as there is room for its ranks and the runs before it have ended.

    names: of the GPUs. before: run in the new process of each run first.
    """
    tpi, free = Tpi(folder), dict.fromkeys(names, SLOTS)
    waiting = sorted(runs, key=lambda run: (run.gpus > len(names), -run.gpus))
    going: dict[str, tuple[Process, list[str], float]] = {}
    ended: dict[str, str | None] = {}
    while waiting or going:
        before_this = len(waiting)
        for run in list(waiting):
            if failed := [name for name in run.after if ended.get(name)]:
                waiting.remove(run)
                ended[run.name] = f"{failed[0]} failed before"
            elif (mine := _room(free, run.gpus)) and all(name in ended for name in run.after):
                waiting.remove(run)
                for name in mine:
                    free[name] -= 1
                if run.resumes is not None:
                    shutil.copytree(folder / run.resumes, folder / run.name)
                more = WITH_GLOO[: 1 if run.scores else None] if len({*mine}) < len(mine) else ()
                process = tpi.start(*run.arguments(), *more, SHARING, before=_on(mine, before, run.margin))
                going[run.name] = process, mine, time.monotonic()
        assert going or len(waiting) < before_this, f"{[run.name for run in waiting]} can never start"
        for name, (process, mine, begun) in list(going.items()):
            took = time.monotonic() - begun
            if took > LIMIT:
                os.kill(process.pid, signal.SIGKILL)
            if process.poll() is not None:
                ended[name] = None if process.status == 0 else f"status {process.status}\n{process.stderr[-TAIL:]}"
                print(f"{name}: status {process.status} after {took:.0f} s", file=sys.stderr, flush=True)
                for gpu in mine:
                    free[gpu] += 1
                del going[name]
        time.sleep(0.05)
    return ended


def _room(free: dict[str, int], ranks: int) -> list[str]:
    """The GPU of each rank, those with most room first; empty if there is too little."""
    each = math.ceil(ranks / len(free))
    having = sorted((name for name in free if free[name] >= each), key=lambda name: -free[name])
    return (having * each)[:ranks] if len(having) * each >= ranks else []


def _on(mine: list[str], before: Callable[[], None], margin: float | None) -> Callable[[], None]:
    def planted() -> None:
        end_with_parent()
        if margin is not None:
            from tp_invariant_recipes.numerics.layers.experts import token_dispatcher

            token_dispatcher.MARGIN = margin
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(mine))
        if len({*mine}) < len(mine):
            _gpus_are_shared(len({*mine}))
        before()

    return planted


def _gpus_are_shared(count: int) -> None:
    """The launcher sees each GPU several times. A rank may be spawned, so that only its RankInfo reaches it."""
    visible, rank_infos = gpus.visible, local._rank_infos
    gpus.visible = lambda: visible() * SHARED
    local._rank_infos = lambda *given: [
        replace(rank_info, local_rank=rank_info.rank % count) for rank_info in rank_infos(*given)
    ]


def _ranks_are_forked() -> None:
    ranks.start_method = lambda device: "fork"  # decided once, below, for all runs


def main() -> None:
    """See the top."""
    runs = [Run(**fields) for fields in json.load(sys.stdin)]
    chosen, ordered = (os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", environment.ORDERED))
    names = [str(n) for n in range(len(gpus.visible()))] if chosen is None else chosen.split(",")
    os.environ.update(environment.settings("gpu", os.environ))
    if ordered is None:
        del os.environ[environment.ORDERED]  # each run's own: FSDP and the combined schedule refuse 1
    bridge.load()
    before = _ranks_are_forked if can_fork(bridge.imported_with) else lambda: None
    began = time.monotonic()
    result = train_all(Path(sys.argv[1]), runs, names, before)
    how = "forked" if before is _ranks_are_forked else "spawned"
    print(f"{len(runs)} runs, ranks {how}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
