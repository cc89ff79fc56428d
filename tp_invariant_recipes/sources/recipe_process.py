"""A recipe runs in a fork of this process: what it patches reaches neither tpi nor the ranks of another run.

It returns plain values. The ranks of a run import its recipe again (`recipe_layer.enter`), each for itself.
"""

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from tp_invariant_recipes.errors import ConfigError, TpiError
from tp_invariant_recipes.sources import recipe_source
from tp_invariant_recipes.start import forking

_exit = os._exit
_processes: set[int] = set()  # this one's id, where it may call recipes


def serve() -> None:
    """Let this process call recipes itself: it forks no ranks."""
    _processes.add(os.getpid())


def forks() -> bool:
    """Whether this process calls recipes in forks of itself."""
    return os.getpid() not in _processes


def run[T](model: str, function: Callable[[], T]) -> T:
    """Return what `function` returns, called in a process that may import and call `model`, if that is a recipe.

    Raises the TpiError that it raises; ConfigError: the recipe raises anything else, or ends the process; RuntimeError:
    a defect of tpi.
    """
    if not recipe_source.is_recipe(model) or not forks():
        return function()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as report:
        starter = os.getpid()
        pid = os.fork()
        if pid == 0:
            _answer(model, function, report, starter)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # Ctrl-C
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        if code != 0:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise ConfigError(f"{model}: the recipe's process {how}")
        report.seek(0)
        outcome, error = pickle.load(report)
    if error is not None:
        raise error
    return outcome


def _answer(model: str, function: Callable[[], Any], report: Any, starter: int) -> NoReturn:
    """Call the function, write what it returns and what it raises, and end this process."""
    status = 1
    try:
        serve()
        forking.end_with_it(starter)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent: KeyboardInterrupt is the recipe's own
        os._exit = _say_where
        outcome: Any = None
        error: Exception | None = None
        try:
            outcome = function()
        except TpiError as refused:
            error = refused
        except BaseException as raised:
            error = RuntimeError(f"in the process of a recipe:\n{traceback.format_exc()}")
            if recipe_source.place(raised):
                error = ConfigError(f"{model}: {recipe_source.raised(raised)}")
        pickle.dump((outcome, error), report)
        report.flush()
        status = 0
    finally:
        _exit(status)


def _say_where(status: int) -> NoReturn:
    """`os._exit` for a recipe: with a traceback. A process that the recipe forks ends as usual."""
    if os.getpid() in _processes:
        raise SystemExit(status)
    _exit(status)
