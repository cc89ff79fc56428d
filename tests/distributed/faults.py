# SPDX-License-Identifier: Apache-2.0
"""What tests plant in a `tpi` in a fork (tests/forks.py), whose ranks inherit it.

A signal that must come while a run trains finds its ranks waiting at a step, so that no test depends on how long steps
take.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def at_step(
    step: int, happens: Callable[[Any], None], *, ranks: Sequence[int] | None = None, world: int | None = None
) -> Callable[[], None]:
    """What to do `before` the command: have `happens(context)` called on these ranks as a step begins.

    step: counted from 1; the ledger may then lack the line of the one before. ranks, world: None: any.
    """

    def plant() -> None:
        from tp_invariant_recipes.observe.digests.callback import Digests

        original = Digests.on_train_step_start

        def changed(self, context):
            here = ranks is None or int(os.environ["RANK"]) in ranks
            there = world is None or int(os.environ["WORLD_SIZE"]) == world
            if here and there and context.state.train_state.step + 1 == step:
                _marker(Path(), step).touch()
                happens(context)
            return original(self, context)

        Digests.on_train_step_start = changed

    return plant


def reached(folder: Path, step: int) -> Callable[[], bool]:
    """Whether a rank of a `tpi` in this folder has come to the fault at this step; all have done the one before."""
    return _marker(folder, step).exists


def _marker(folder: Path, step: int) -> Path:
    return folder / f"reached-{step}"


def ranks_of(launcher: int) -> list[int]:
    """The processes that a `tpi` has started."""
    children = subprocess.run(["ps", "--ppid", str(launcher), "-o", "pid="], capture_output=True, text=True)
    return sorted(map(int, children.stdout.split()))


def lives(pid: int) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()


def stop(process: Any, when: Callable[[], bool], number: int, status: int) -> list[int]:
    """Send a signal to a `tpi` when it comes to something; return its ranks, of which none is left.

    status: how it must end.
    """
    process.until(when)
    ranks = ranks_of(process.pid)
    os.kill(process.pid, number)
    assert process.wait() == status
    assert not any(map(lives, ranks))
    assert "Traceback" not in process.stderr
    return ranks


def has_lines(file: Path, most: int) -> Callable[[], bool]:
    """Whether a file has more than so many lines."""
    return lambda: file.exists() and file.read_bytes().count(b"\n") > most


def fail(context: Any) -> None:
    """Fail for a reason of one's own."""
    raise ValueError("planted")


def wait_for_ever(context: Any) -> None:
    """Until SIGKILL."""
    while True:
        signal.pause()


def wait_for_sigterm(context: Any) -> None:
    """Until Bridge has noted it, to save after this step."""
    while not context.state.signal_handler._signal_received:
        time.sleep(0.01)


def without(*targets: str) -> Callable[[], None]:
    """Leave the replacements out whose targets end so."""

    def plant() -> None:
        from tp_invariant_recipes.numerics.megatron import replacements

        table = replacements.replacements
        replacements.replacements = lambda *arguments: tuple(
            row for row in table(*arguments) if not row.target.endswith(targets)
        )

    return plant


def product_per_rank() -> None:
    """Let a weight gradient of gathered matrices be one product, not one for each chunk of tokens."""
    from tp_invariant_recipes.numerics.layers import linear

    def whole_product(grad, rows, mesh, gemm):
        node = linear._subtree((grad,), (rows,), 0, 1, gemm)
        return linear.start_reduce_scatter(node.view(1, mesh.size, -1), mesh)

    linear._start_weight_gradient = whole_product


def fewer_kept_bits() -> None:
    """Let a product of numerics=portable keep a bit less of each sum."""
    from tp_invariant_recipes.kernels.cpu import tensor_core_cpu

    tensor_core_cpu.KEPT_BITS -= 1
    tensor_core_cpu.gemm.__kwdefaults__["kept"] -= 1  # taken from KEPT_BITS where `product` is defined


def unchecked(arithmetic: Callable[[], None]) -> Callable[[], None]:
    """Other arithmetic of numerics=portable, with which it trains all the same."""

    def plant() -> None:
        from tp_invariant_recipes.portable import definition

        definition.require_conformance = lambda gpu, *, fp8=False: None
        arithmetic()

    return plant
