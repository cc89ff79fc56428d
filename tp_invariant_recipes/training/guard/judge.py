"""The thread that compares what nets have copied to the host, while the run goes on."""

import queue
import threading
from collections.abc import Callable

from tp_invariant_recipes.training.guard.fault import WrongBits

Case = Callable[[], WrongBits | None]
WAITING = 256  # cases; a rank whose host is slower than its processor then waits for it


class Judge:
    """Decides cases in their order."""

    def __init__(self) -> None:
        self._cases: queue.Queue[Case | None] = queue.Queue(WAITING)
        self.findings: list[WrongBits] = []
        self._failed: BaseException | None = None
        self.decided = 0  # cases
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def submit(self, case: Case) -> None:
        """Have a case decided. It may wait for the GPU."""
        self._cases.put(case)

    def found(self) -> list[WrongBits]:
        """What is wrong, of the cases decided so far. Raises what a case has raised."""
        if self._failed is not None:
            raise self._failed
        return list(self.findings)

    def wait(self) -> list[WrongBits]:
        """Wait until all cases are decided, then return `found()`."""
        self._cases.join()
        return self.found()

    def close(self) -> None:
        """End the thread."""
        self._cases.put(None)

    def _run(self) -> None:
        while (case := self._cases.get()) is not None:
            try:
                finding = case()
                if finding is not None:
                    self.findings.append(finding)
            except BaseException as error:  # which the rank's own thread raises
                self._failed = self._failed or error
            self.decided += 1
            self._cases.task_done()
        self._cases.task_done()
