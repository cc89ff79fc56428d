# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: open its log, set its environment, build its configuration, run Bridge's pretrain()."""

import faulthandler
import json
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tp_invariant_recipes.errors import TpiError
from tp_invariant_recipes.files import errno_of
from tp_invariant_recipes.ledger.run_files import Reason
from tp_invariant_recipes.numerics.mode import STOCK
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings import finetuning, low_precision
from tp_invariant_recipes.settings.cuda_graphs import FULL
from tp_invariant_recipes.settings.run_config import RunConfig
from tp_invariant_recipes.sources import recipe_layer, recipe_source
from tp_invariant_recipes.start import forking
from tp_invariant_recipes.training import heartbeat
from tp_invariant_recipes.training.heartbeat import Phase

# Seconds that a failed rank may clean up, and that a finished one may wait for threads and processes that it has left.
LAST_SECONDS = 3.0


@dataclass(frozen=True)
class RankInfo:
    """One rank: its number, and where all ranks meet. ports: of a TCP store for each process group in turn."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    ports: tuple[int, ...]

    def environment(self, group: int = 0) -> dict[str, str]:
        """Return the variables that torchrun would set. group: of the process groups, which one.

        The launcher holds the store, so that no other process can take the port.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.ports[group]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


def main(
    index: int,
    run: str,
    rank_infos: Sequence[RankInfo],
    rank_fn: Callable[[RunDir, RankInfo], None],
    heartbeats: heartbeat.Heartbeats,
    locks: Any = None,
) -> None:
    """Run one rank of the run in directory `run`; returns when it is done, or stopped by a signal after saving.

    index:       this rank's in `rank_infos`.
    rank_fn:     what the rank does, a function of a module.
    heartbeats:  where the launcher reads what this rank does.
    locks:       the launcher's, of directories (runs/lock.py): the rank holds them too, until it ends.
    On failure the process ends with status 1 and leaves the reason in `RunDir.failure(rank)` for the launcher.
    """
    global _mine  # noqa: PLW0603  one of a process
    run_dir, rank_info = RunDir(Path(run)), rank_infos[index]
    _die_with_launcher()
    heartbeats.wait_for_all()
    os.environ.update(rank_info.environment())
    # torch reads it at its import, which a forked rank's launcher made before.
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal() and int(threads) > 0:
        sys.modules["torch"].set_num_threads(int(threads))
    # A program that starts a training may have made warnings errors, as tests do; Megatron warns of itself.
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.simplefilter("default")
    _mine = run_dir, rank_info.rank
    try:
        with _logged(run_dir, rank_info):
            heartbeats.begin(index)
            rank_fn(run_dir, rank_info)
    except BaseException as error:
        if not _bridge_leaves(error):
            fail(error)
            _flush()
            # Not sys.exit: threads that wait for other ranks could keep a failed one alive.
            os._exit(1)
    heartbeat.sign(Phase.DONE)
    _end()


# The run and the number of this process, while it is a rank that has not failed.
_mine: tuple[RunDir, int] | None = None


def fail(error: BaseException | None) -> None:
    """Write down why this rank fails, and end the process `LAST_SECONDS` later, wherever it is then.

    Called where an error first passes, since what cleans up after it may wait for ranks that wait for this one, or for
    a GPU that never answers. Later calls do nothing, nor does one in a process that the launcher has not started.
    """
    global _mine
    if error is None or _mine is None or _bridge_leaves(error):
        return
    mine, _mine = _mine, None
    with suppress(RuntimeError, MemoryError):  # where no thread can be started
        faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=2)  # a thread of C: it needs nothing of Python
    _write_failure(*mine, error)
    for cause in () if isinstance(error, TpiError) else _causes:
        with suppress(Exception):  # of a GPU that has failed
            if (found := cause()) is not None:
                _write_failure(*mine, found)


def _end() -> NoReturn:
    """End this process as multiprocessing would, but give threads and processes that it has left LAST_SECONDS."""

    def ordinary() -> None:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        threading._shutdown()  # type: ignore[attr-defined]

    ending = threading.Thread(target=ordinary, daemon=True)
    with suppress(RuntimeError):  # where no thread can be started
        ending.start()
        ending.join(LAST_SECONDS)
    if ending.is_alive():
        left = [thread.name for thread in threading.enumerate() if not thread.daemon]
        left += [child.name for child in multiprocessing.active_children()]
        print(f"{', '.join(left)}: alive {LAST_SECONDS:.0f} s after the end of this rank, and killed")
    for child in multiprocessing.active_children():
        child.kill()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # of a full disk
            stream.flush()


_causes: list[Callable[[], BaseException | None]] = []  # of callbacks that may know why this rank fails
_leaving = False  # whether Bridge has decided to leave its loop, which it does by sys.exit(0)


def _bridge_leaves(error: BaseException) -> bool:
    return _leaving and isinstance(error, SystemExit) and not error.code


def leaving(callbacks: list) -> Replacement:
    """Return the row that notes that Bridge leaves, and calls the `on_leave` of callbacks with its state."""

    def noted(original: Callable[..., bool]) -> Callable[..., bool]:
        def decide(state: Any, *args: Any, **kwargs: Any) -> bool:
            global _leaving
            if _leaving := original(state, *args, **kwargs):
                for callback in callbacks:
                    getattr(callback, "on_leave", lambda state: None)(state)
            return _leaving

        return decide

    why = "loggers wrap sys.exit, so that a traceback does not tell Bridge's from a user's"
    return Replacement("megatron.bridge.training.train:checkpoint_and_decide_exit", noted, why)


@contextmanager
def closing(callbacks: list) -> Iterator[None]:
    """At the end of the block, and of a failed one, close the callbacks that can be closed.

    The `cause()` of those that have one may say why this rank fails.
    """
    _causes[:] = [callback.cause for callback in callbacks if hasattr(callback, "cause")]
    try:
        yield
    except BaseException as error:
        fail(error)
        raise
    finally:
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()


def adapt(stack: ExitStack, config: RunConfig) -> None:
    """Until `stack` ends, adapt this process to the run's machine. RunError: the numerics does not hold on it."""
    import torch

    from tp_invariant_recipes.cpu_host import cpu
    from tp_invariant_recipes.numerics.sums import symmetric_memory
    from tp_invariant_recipes.patches import registry

    on_cpu = config.device.kind == "cpu"
    # A forked rank inherits the mode of whatever configuration its launcher validated last.
    torch.use_deterministic_algorithms(bool(config.model.get("deterministic_mode")))
    symmetric_memory.choose(config.device.peer_memory)
    if (arithmetic := config.numerics.arithmetic) is not None:
        gpu = None if on_cpu else int(os.environ["LOCAL_RANK"])
        arithmetic.require_machine(gpu, fp8=low_precision.adds_fp8(config))
    if on_cpu:
        stack.enter_context(cpu.installed())
    stack.enter_context(registry.applied(config))


def pretrain(config: RunConfig, callbacks: list, forward_step: Callable | None = None) -> None:
    """Adapt this process to the run's device and numerics, and run Bridge's pretrain(). Can be called repeatedly.

    forward_step: of Bridge's loop; None: Bridge's own for GPT. Bridge is loaded (start/bridge.py).
    """
    heartbeat.sign(Phase.SETTING_UP)
    recipe_layer.enter(config.recipe)
    with ExitStack() as stack:
        from tp_invariant_recipes.config import container
        from tp_invariant_recipes.numerics.megatron import lora as adapters
        from tp_invariant_recipes.numerics.megatron import replacements
        from tp_invariant_recipes.observe.optimizer_step import OptimizerStep
        from tp_invariant_recipes.training import async_writer, written_hashes

        optimizer_step = OptimizerStep(callbacks)
        stack.callback(optimizer_step.restore)
        callbacks = [*callbacks, optimizer_step]
        adapt(stack, config)
        if config.numerics.mode != STOCK:
            from tp_invariant_recipes.training.callbacks import DeterministicOverhead

            callbacks = [*callbacks, DeterministicOverhead()]
        if config.model.get("cuda_graph_impl") == FULL:
            from tp_invariant_recipes.training.callbacks import Finite

            callbacks = [*callbacks, Finite()]
        callbacks = [heartbeat.First(partial(heartbeat.takes_long, config)), *callbacks, heartbeat.Last()]
        # A guard's come first: what is replaced next adds up the passes of a step, and not those that a guard repeats.
        rows = [row for callback in callbacks for row in getattr(callback, "replacements", tuple)()]
        rows += [
            *replacements.replacements(config.numerics),
            FAILING_FIRST,
            JOINING,
            SILENT_HANDLER,
            PROFILES,
            leaving(callbacks),
            MLFLOW_RUN,
            YAML_WRITER,
            *written_hashes.REPLACEMENTS,
        ]
        if finetuning.adapts(config):
            rows += adapters.replacements(config.numerics, config.section("rng")["seed"], config.weights.folder)
        stack.enter_context(applied(rows))
        if config.section("checkpoint").get("async_save"):
            stack.enter_context(async_writer.installed(callbacks))
        from megatron.bridge.training import gpt_step
        from megatron.bridge.training.pretrain import pretrain as bridge_pretrain

        built = container.build(config)
        if (folder := container.imported_folder(config)) is not None:
            from tp_invariant_recipes.training.imported_weights import ImportedWeights

            imported = ImportedWeights(folder)
            built.model.register_pre_wrap_hook(imported.load)
            callbacks = [imported, *callbacks]
        bridge_pretrain(built, forward_step or gpt_step.forward_step, callbacks=callbacks)


def _failing_first(original: Callable[..., None]) -> Callable[..., None]:
    def cleanup(*args: Any, **kwargs: Any) -> None:
        fail(sys.exc_info()[1])  # Bridge calls this while it handles the error
        original(*args, **kwargs)

    return cleanup


FAILING_FIRST = Replacement(
    "megatron.bridge.training.pretrain:_cleanup_after_pretrain_failure",
    _failing_first,
    "it disconnects the other ranks, which may then note their failure before this rank does, and it may never return",
)


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(*args: Any, **kwargs: Any) -> Any:
        heartbeat.sign(Phase.JOINING)
        groups = original(*args, **kwargs)
        heartbeat.sign(Phase.SETTING_UP)
        return groups

    return initialize


JOINING = Replacement(
    "megatron.bridge.training.initialize:_initialize_distributed",
    _joining,
    "where memory is short, ranks wait for each other there without an end; a set-up may take half an hour, this not",
)

# Its one caller is the handler of SIGTERM. Bridge's loop logs later that it stops.
SILENT_HANDLER = Replacement(
    "megatron.bridge.training.utils.sig_utils:print_rank_0",
    lambda original: lambda message: None,
    "a handler that prints fails where it interrupts a print, and the checkpoint is lost",
)


def _in_the_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(config: Any, tensorboard_dir: str | None) -> Any:
        if tensorboard_dir is None and _mine is not None:
            tensorboard_dir = str(_mine[0].logs)
        return original(config, tensorboard_dir)

    return initialize


PROFILES = Replacement(
    "megatron.bridge.training.train:initialize_pytorch_profiler",
    _in_the_run,
    "traces go to torch_profile beside TensorBoard's directory, and without one into the working directory",
)

MLFLOW_RUN = Replacement(
    "megatron.bridge.training.train:end_active_mlflow_run",
    lambda original: lambda status: None,
    "it imports MLflow, for seconds that a scheduler may not grant; `experiments.Verdict` ends its run after the rest",
)

YAML_WRITER = Replacement(
    "yaml:SafeDumper",
    lambda original: getattr(import_module("yaml"), "CSafeDumper", original),
    "each save writes the configuration, half of the time of a small one; libyaml writes the same text",
)


def _die_with_launcher() -> None:
    """Die when the launcher dies, even by SIGKILL. Ignore what is for the launcher: Ctrl-C and SIGHUP, which a terminal
    sends to every process, and SIGUSR1 and SIGUSR2, which SLURM sends to every process of a job's step.
    """
    forking.end_with_starter()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until Bridge takes it over to save first


class _Tee:
    def __init__(self, first: TextIO, second: TextIO) -> None:
        self._first, self._second = first, second

    def write(self, text: str) -> int:
        self._second.write(text)
        return self._first.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)


@contextmanager
def _logged(run_dir: RunDir, rank_info: RankInfo) -> Iterator[None]:
    """Send this process's output to the rank's log; what Bridge prints on the first and last rank also to its own."""
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    log = os.open(run_dir.rank_log(rank_info.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # A silent resource tracker of this rank's own, when it is needed. What one says of a killed rank would come to the
    # user's terminal: from the launcher's tracker, or as one of the last lines of the rank's log.
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 -- for the whole process
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    for handler in logging.root.handlers:  # of the launcher: a notebook's would show the log in a cell
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    if rank_info.rank in (0, rank_info.world_size - 1):
        with run_dir.bridge_log.open("a", buffering=1, encoding="utf-8") as bridge:
            sys.stdout = _Tee(sys.stdout, bridge)
            yield
            sys.stdout = sys.stdout._first
    else:
        yield


def _text(error: BaseException) -> str:
    try:
        return str(error) or repr(error)
    except Exception as second:
        return f"its text cannot be made: str() of it raises {type(second).__name__}"


def _write_failure(run_dir: RunDir, rank: int, error: BaseException) -> None:
    with suppress(OSError):  # of a full disk, where the reason may still fit
        traceback.print_exception(error)
    text = f"{_text(error)}{recipe_source.place(error)}"
    reason = Reason(
        rank=rank,
        time=time.time(),
        kind=type(error).__name__,
        message=text.encode(errors="replace").decode(),  # half a character is no text
        user_error=isinstance(error, TpiError),
        errno=errno_of(error),
    )
    try:
        run_dir.failure(rank).write_text(json.dumps(reason.as_json()), encoding="utf-8")
    except OSError:
        traceback.print_exc()  # a full disk: the launcher looks at the disk itself
