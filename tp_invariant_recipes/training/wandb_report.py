"""The callback that sends the figures of a run to Weights & Biases."""

import io
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.ledger.digests import group_digests, whole_digest
from tp_invariant_recipes.ledger.lines import DIGESTED
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.runs.run_dir import RunDir

PREFIX = "ledger"  # of all that we send, beside Bridge's own names


class WandbReport(Callback):
    """Sends figures, identity and last digests when training ends. For the last rank: it has Bridge's logger.

    Nothing is sent without `logging=wandb`. What goes wrong is a warning in the rank's log: the run is done, and its
    ledger is on the disk.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    def on_train_end(self, context: CallbackContext) -> None:
        """Read back the ledger, which is whole by now, and send what a report shows of a run alone."""
        try:
            logger = context.state.wandb_logger
            if logger is not None:
                self._send(logger, context.state.train_state.step)
        except Exception:
            traceback.print_exc()
            print("warning: the figures of the ledger did not reach Weights & Biases", file=sys.stderr)

    def _send(self, logger: Any, step: int) -> None:
        """logger: the module wandb, as Bridge hands it out."""
        from PIL import Image

        from tp_invariant_recipes.report import figures, render
        from tp_invariant_recipes.report.runs import gather

        report = gather([self.run_dir.path])
        ledger = report.runs[0].ledger
        drawings = [drawing for drawing in (figures.training(report), figures.cost(report)) if drawing is not None]
        sent: dict[str, Any] = {}
        for drawing in drawings:
            image = Image.open(io.BytesIO(render.png([drawing])))
            sent[f"{PREFIX}/{drawing.name}"] = logger.Image(image, caption=drawing.title)
        last = _last_digests(ledger)
        for kind, (_, digests) in last.items():
            groups = [list(row) for row in group_digests(digests).items()]
            sent[f"{PREFIX}/{kind}"] = logger.Table(columns=["group", "digest"], data=groups)
        logger.log(sent, step=step)
        summary: dict[str, Any] = {"identity_hash": ledger.header.identity_hash}
        for kind, (at, digests) in last.items():
            summary |= {f"{kind}_step": at, f"{kind}_digest": whole_digest(digests)}
        logger.run.summary.update({f"{PREFIX}/{name}": value for name, value in summary.items()})


def _last_digests(ledger: Ledger) -> dict[str, tuple[int, Mapping[str, str]]]:
    """Of gradients and weights: the last step that has digests, and these; a kind without any is not there."""
    found = {kind: [s for s in ledger.steps if getattr(s, kind) is not None] for kind in DIGESTED}
    return {kind: (steps[-1].step, getattr(steps[-1], kind)) for kind, steps in found.items() if steps}
