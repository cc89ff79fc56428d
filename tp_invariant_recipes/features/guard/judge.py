"""The thread that compares what nets have copied, while the run goes on.

A case waits for the GPU's work that was launched before it was submitted, on whatever stream: Bridge trains with
`cuda_graph=te` on a stream of its own, and the thread's copies to the host know only theirs.

Cases of a step are decided once the next step's passes are launched. Until then the rank's own thread launches the
optimizer and the passes, and would wait for Python's lock, up to sys.getswitchinterval() each time.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tp_invariant_recipes.features.guard.fault import WrongBits

Case = Callable[[], WrongBits | None]
WAITING = 256  # cases; a rank whose host is slower than its processor then waits for it


class Judge:
    """Decides cases in their order. decided: how many. findings: of these."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "guard")
        self._of_step: list[tuple[Case, Any]] = []
        self._cases: deque[Future[WrongBits | None]] = deque()
        self.findings: list[WrongBits] = []
        self.decided = 0

    def submit(self, case: Case, stream: Any = None) -> None:
        """Have a case decided after the next `begin`. stream: whose work it may read; None: the current one."""
        self._of_step.append((case, _launched(stream)))

    def begin(self) -> None:
        """Have all cases decided that were submitted."""
        for case, launched in self._of_step:
            self._take(WAITING - 1)
            self._cases.append(self._executor.submit(_decided, case, launched))
        self._of_step = []

    def poll(self) -> list[WrongBits]:
        """Return the findings of the cases decided so far. Raises what a case has raised."""
        while self._cases and self._cases[0].done():
            self._take(len(self._cases) - 1)
        return list(self.findings)

    def wait(self) -> list[WrongBits]:
        """Wait until all cases are decided, then return what `poll` does."""
        self.begin()
        self._take(0)
        return self.poll()

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _take(self, most: int) -> None:
        """Wait for the first cases, until at most so many are waiting."""
        while len(self._cases) > most:
            finding = self._cases.popleft().result()
            self.decided += 1
            if finding is not None:
                self.findings.append(finding)


def _launched(stream: Any) -> Any:
    """Return an event after what the stream was given; None: no GPU is in use."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def _decided(case: Case, launched: Any) -> WrongBits | None:
    if launched is not None:
        launched.synchronize()
    return case()
