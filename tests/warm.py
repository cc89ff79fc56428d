# SPDX-License-Identifier: Apache-2.0
"""What every launcher and rank does anew as it starts, done once in the worker that they are forked from.

Half of what a short run computes.
"""

import contextlib
import io
import logging
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# What is planned once in the worker. It fills the caches of parsers and of pydantic.
PLANNED = ("tp=2",), ("numerics=stock",)


def _enabled_for(self: logging.Logger, level: int) -> bool:
    """Without a cache, which every new level of each of Megatron-Bridge's loggers empties in all loggers."""
    return not self.disabled and self.manager.disable < level >= self.getEffectiveLevel()


def warm() -> None:
    """After Bridge's import."""
    from tp_invariant_recipes.ledger import stream
    from tp_invariant_recipes.ledger.record import Header
    from tp_invariant_recipes.ledger.run_files import ProgressLine, Restarted, RunFile
    from tp_invariant_recipes.numerics.megatron import init
    from tp_invariant_recipes.reading import _adapter
    from tp_invariant_recipes.runs.lock import Holder
    from tp_invariant_recipes.runs.run_dir import IndexManifest

    init.rule_of("")  # compiles the patterns of all rules
    for kind in (Restarted, Header, Holder, IndexManifest, ProgressLine, RunFile, stream._Step):
        _adapter(kind)
    logging.Logger.isEnabledFor = _enabled_for
    logging.Manager._clear_cache = lambda self: None
    _plan()
    _load_initial_weights()


def _plan() -> None:
    """`tpi train --dry-run`, in this process."""
    from tp_invariant_recipes.cli.main import main

    for words in PLANNED:
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", ["tpi", "train", "qwen3_toy", *words, "device=cpu", "--dry-run"]),
            contextlib.redirect_stdout(io.StringIO()),
            pytest.raises(SystemExit) as end,
        ):
            main()
        assert not end.value.code


def _load_initial_weights() -> None:
    """The loop that draws weights, which `begin` has forks use."""
    from tp_invariant_recipes.numerics.megatron import init

    with mock.patch.object(init, "COMPILED", 0):
        init.sample([1, 2], [[(0, 1)], [(0, 2)]], init._Normal(1.0), seed=1, name="")


def load_portable() -> None:
    """What a rank of numerics=portable reads from the disk and computes as it starts: more than its steps take."""
    from tp_invariant_recipes.portable.mode import MODE

    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1000"):  # without threads, which no fork inherits
        MODE.require_machine(None)
        _load_loops()


def _load_loops() -> None:
    """Each loop that numba has compiled and kept."""
    from numba.core.caching import FunctionCache
    from numba.core.dispatcher import Dispatcher

    modules = [module for name, module in [*sys.modules.items()] if name.startswith("tp_invariant_recipes.")]
    loops = [value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)]
    for loop in {*loops}:
        if isinstance(loop._cache, FunctionCache):
            codegen = loop.targetctx.codegen()
            for key in loop._cache._cache_file._load_index():
                if key == loop._cache._index_key(key[0], codegen):
                    loop.compile(key[0])


class Trials(dict[Any, bool]):
    """What trials of forms have found: in this process, and in the runs that have ended.

    A rank tries whether one call has the bits of several, for each shape: a third of what a short run computes. Forks
    of a worker are one machine with one set of libraries, so that ranks of the next run need not try the same again.
    """

    def __init__(self, file: Path) -> None:
        """file: of the workers of a session."""
        super().__init__()
        self.file = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.read = 0

    def refresh(self) -> None:
        """Take what forks have added, those of other workers too."""
        stream = io.BytesIO(os.pread(self.file, 1 << 24, self.read))
        with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the end, or a fork writes just now
            while True:
                at = stream.tell()
                super().__setitem__(*pickle.load(stream))
        self.read += at

    def get(self, kind: Any, default: bool | None = None) -> bool | None:
        """What is known of a kind with as many threads."""
        return super().get((_threads(), kind), default)

    def __setitem__(self, kind: Any, exact: bool) -> None:
        super().__setitem__((_threads(), kind), exact)
        os.write(self.file, pickle.dumps(((_threads(), kind), exact)))


trials: list[Trials] = []  # of products and of attention


def share_trials(folder: Path) -> None:
    """Have forks of this process try nothing that another has tried. folder: of all workers of the session."""
    trials[:] = Trials(folder / "trials-products"), Trials(folder / "trials-attention")


def begin(*, planted: bool) -> None:
    """In a fork: draw all weights by the loop that is loaded, and try nothing that an earlier run has tried.

    planted: whether the run gets a fault; then nothing is known of its arithmetic.
    """
    from tp_invariant_recipes.numerics.gemm import cpu
    from tp_invariant_recipes.numerics.layers import attention
    from tp_invariant_recipes.numerics.megatron import init
    from tp_invariant_recipes.portable import definition

    init.COMPILED = 0
    if planted:
        definition.require_conformance.cache_clear()
    elif trials:
        cpu._batched_is_exact, attention._batched_is_exact = trials


def _threads() -> int:
    return sys.modules["torch"].get_num_threads()
