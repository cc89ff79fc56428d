# SPDX-License-Identifier: Apache-2.0
"""Attacks on `tpi`: whatever a command is given, it ends soon, with status 0 or 2, and says why in one message.

Commands run in this process, and none starts ranks. A campaign draws its cases from SEED; `make test` has some of them.
"""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cli.test_wrong_commands import CONTROL, MESSAGE
from tests.unit.ledger.test_ledger_digests import HEADER, RECORD
from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.launch import plan, ranks, record
from tp_invariant_recipes.launch import train as launch
from tp_invariant_recipes.ledger.record import LedgerWriter
from tp_invariant_recipes.machine import gpus
from tp_invariant_recipes.runs import checkpoints

SECONDS = 100  # a command takes at most on a busy machine; most take 0.1 s


class Hung(BaseException):
    """A command did not end."""


class Started(BaseException):
    """A command found nothing wrong, and would start ranks."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hung in the block after so many seconds, wherever it waits. pytest's own limit holds again afterwards."""

    def stop(*_: object) -> None:
        raise Hung

    handler = signal.signal(signal.SIGALRM, stop)
    remaining = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *remaining)
        signal.signal(signal.SIGALRM, handler)


Attack = Callable[..., str | None]


@pytest.fixture
def attack(bridge: None, cli, monkeypatch: pytest.MonkeyPatch) -> Attack:
    """`attack("compare", a, b)`: what is wrong with how the command ended; None: nothing.

    allowed: exit statuses. seconds: within which it must end.
    """

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(ranks, "run", start)
    monkeypatch.setattr(launch, "validate", lambda planned, **_: "")  # Bridge's own, which takes the import of Bridge
    monkeypatch.setattr(gpus, "visible", lambda: [])

    def run(*words: object, allowed: tuple[int, ...] = (0, 2), seconds: float = SECONDS) -> str | None:
        try:
            with limited(seconds):
                ended = cli(*words)
        except Hung:
            return "it hangs"
        except Started:
            return None
        except BaseException as error:
            return f"{type(error).__name__} came out of main()"
        if "Traceback" in ended.err or "defect of tpi" in ended.err:
            return f"a traceback: {ended.err.strip().splitlines()[-2]}"
        messages = len(MESSAGE.findall(ended.err) or MESSAGE.findall(ended.out))  # a verdict is the command's output
        expected = (0, 1) if ended.status == 2 and "--json" in words else (int(ended.status == 2),)  # or in the JSON
        if ended.status not in allowed or messages not in expected:
            return f"status {ended.status}, {messages} messages: {ended.err[-300:]}"
        return "control characters" if CONTROL.search(ended.out + ended.err) else None

    return run


STEPS = 4
MODEL = (
    "iters=4", "save=2", "seq=32", "gbs=2", "model.num_layers=1", "model.vocab_size=512",
    "scheduler.lr_decay_iters=9",
)  # fmt: skip


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as a training of four steps leaves it, with two checkpoints, but for what tensors hold."""
    path = tmp_path_factory.mktemp("made") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "visible", lambda: [])
        patch.setattr("sys.argv", ["/usr/bin/tpi", "train", "qwen3_toy"])
        planned = plan.new(compose("qwen3_toy", [*MODEL, f"run.dir={path}"], device="cpu"))
        record.write(planned)
    run = json.loads((path / "run.json").read_text())
    run["attempts"][0] |= {"outcome": "completed", "to_step": STEPS}
    (path / "run.json").write_text(json.dumps(run))
    header = replace(HEADER, identity=planned.identity, layout=planned.layout.as_dict())
    with LedgerWriter(path).create(header) as ledger:
        for step in range(1, STEPS + 1):
            ledger.append(replace(RECORD, step=step, samples=2 * step, tokens=64 * step, diverged=()))
    line = {"step": 1, "loss": 1.5, "seconds": 0.5, "tokens": 8, "peak_memory": 0}
    (path / "progress.jsonl").write_text("".join(json.dumps(line | {"step": n + 1}) + "\n" for n in range(STEPS)))
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "rank-0.log").write_text("a line\n")
    for step in (2, 4):
        folder = checkpoints.iteration_dir(path / "checkpoints", step)
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", ".metadata", "metadata.json", "train_state.pt", "run_config.yaml"):
            (folder / name).write_bytes(f"{name} at {step}".encode() * 20)
        state = fingerprint.optimizer_state(planned.config)
        checkpoints.write_manifest(folder, step, planned.identity_hash, planned.layout.as_dict(), state)
    return path


@pytest.fixture
def run(made_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`run` and `other` in the current directory: copies of the run, which a test may damage."""
    here = tmp_path / "here"
    for name in ("run", "other"):
        shutil.copytree(made_run, here / name)
    monkeypatch.chdir(here)
    return Path("run")
