# SPDX-License-Identifier: Apache-2.0
"""What waits in a backward pass, and GEMMs of weight gradients that run while a collective of the pass moves bytes.

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


class Waiting[T]:
    """What waits in each backward pass, in order, for `finish`, which gets all of it when the pass ends at the latest.

    A failed pass leaves its items behind, and no other pass may have them.
    """

    def __init__(self, finish: Callable[[list[T]], None]) -> None:
        self._finish = torch.no_grad()(outside_modes(finish))
        self._of_pass: dict[int, list[T]] = {}

    def add(self, item: T) -> None:
        """Have an item wait in this pass."""
        backward = torch._C._current_graph_task_id()
        if backward not in self._of_pass:
            self._of_pass[backward] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(backward))
        self._of_pass[backward].append(item)

    def finish(self) -> None:
        """Finish what waits in this pass. Outside of a pass nothing does."""
        backward = torch._C._current_graph_task_id()
        if self._of_pass.get(backward):
            items, self._of_pass[backward] = self._of_pass[backward], []
            self._finish(items)

    def finish_all(self) -> None:
        """Finish what waits in all passes."""
        for backward in list(self._of_pass):
            self._end(backward)

    def forget(self) -> None:
        """Drop what a failed pass has left."""
        self._of_pass.clear()

    def _end(self, backward: int) -> None:
        if items := self._of_pass.pop(backward, []):
            self._finish(items)


def _run(gemms: list[Callable[[], object]]) -> None:
    for gemm in gemms:
        gemm()


GEMMS = Waiting[Callable[[], object]](_run)
