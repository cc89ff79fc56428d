# SPDX-License-Identifier: Apache-2.0
"""GEMMs of weight gradients that wait, and run while a collective of the same backward pass moves bytes.

Nothing else in a backward pass needs a weight's gradient. A row-parallel GEMM's waits for the gather of the next one's
output gradient, which nothing else would hide:

    fc2     gather dy | dx                      | dw waits
    fc1             dx, reduce-scatter | dw of fc1 |
    proj    gather dy | dw of fc2 | dx          | dw waits

What still waits when the pass ends runs then. GEMMs run in the order in which they came, so that a weight that is used
twice gets its gradients in the order of the uses.
"""

from collections.abc import Callable

import torch

from tp_invariant_recipes.function_modes import outside_modes

# By backward pass: a failed pass leaves its GEMMs behind, and no other pass may run them.
_waiting: dict[int, list[Callable[[], object]]] = {}


def wait(gemm: Callable[[], object]) -> None:
    """Have a GEMM of this backward pass run at its next gather, or at its end."""
    backward = torch._C._current_graph_task_id()
    if backward not in _waiting:
        _waiting[backward] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _run(_waiting.pop(backward, [])))
    _waiting[backward].append(gemm)


def run() -> None:
    """Run what waits in this backward pass. Outside of a pass nothing does."""
    if waiting := _waiting.get(torch._C._current_graph_task_id()):
        _run(waiting)


def run_all() -> None:
    """Run what waits in all passes: for gradients that are to be complete before the passes end."""
    for waiting in _waiting.values():
        _run(waiting)


def forget() -> None:
    """Drop what a failed backward pass has left."""
    _waiting.clear()


@torch.no_grad()
@outside_modes
def _run(waiting: list[Callable[[], object]]) -> None:
    while waiting:
        waiting.pop(0)()
