"""The callback that sends the figures and the certificate of a run to Weights & Biases, MLflow and Comet.

Each gets what a report shows of a run alone, the identity and last digests of its ledger, and the certificate of a run
that has reached its last step: the same bytes that `tpi certify RUN` writes later.
"""

import io
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from tp_invariant_recipes.ledger import certificate
from tp_invariant_recipes.ledger.digests import summaries
from tp_invariant_recipes.ledger.reader import Ledger
from tp_invariant_recipes.ledger.schema import DIGESTED
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.runs import attempts
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig

PREFIX = "ledger"  # of all that we send, beside Bridge's own names


@dataclass(frozen=True)
class Sent:
    """What a service gets.

    figures:     name -> its caption and a PNG. tables: kind of digest -> rows of group and digest.
    summary:     identity, and the model's last digests with their steps.
    certificate: the file in a folder that lasts until all is sent; None: the run is not at its last step.
    """

    figures: dict[str, tuple[str, bytes]]
    tables: dict[str, list[list[str]]]
    summary: dict[str, Any]
    certificate: Path | None
    step: int


class ExperimentReport(Callback):
    """Sends it when training ends. For the last rank: it has Bridge's loggers.

    Nothing is sent without one. What goes wrong is a warning in the rank's log: the run is done, and its ledger is on
    the disk.
    """

    def __init__(self, run_dir: RunDir, steps: int) -> None:
        """Note the steps of the whole run."""
        self.run_dir, self.steps = run_dir, steps
        self._state: Any = None
        self._done = False

    def on_train_start(self, context: CallbackContext) -> None:
        """Remember who holds the loggers, for `close`."""
        self._state = context.state

    def on_train_end(self, context: CallbackContext) -> None:
        """Read back the ledger, which is whole by now, and send it."""
        state, step = context.state, context.state.train_state.step
        self._done = step == self.steps
        loggers = {name: logger for name in SENDERS if (logger := getattr(state, name, None)) is not None}
        for name, logger in loggers.items():
            title, send = SENDERS[name]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    send(logger, self._gather(step, Path(folder)))
            except Exception:
                traceback.print_exc()
                print(f"warning: the figures of the ledger did not reach {title}", file=sys.stderr)

    def close(self) -> None:
        """End the run of MLflow and Comet, which otherwise end when an interpreter exits; a killed one does not."""
        if (mlflow := sys.modules.get("mlflow")) is not None and mlflow.active_run() is not None:
            failed = sys.exc_info()[0] not in (None, SystemExit)
            _quietly("MLflow", partial(mlflow.end_run, "FAILED" if failed else "FINISHED" if self._done else "KILLED"))
        if (comet := getattr(self._state, "_comet_logger", None)) is not None:
            _quietly("Comet", comet.end)

    def _gather(self, step: int, folder: Path) -> Sent:
        from tp_invariant_recipes.report import figures, render
        from tp_invariant_recipes.report.runs import gather

        report = gather([self.run_dir.path])
        ledger = report.runs[0].ledger
        drawings = [drawing for drawing in (figures.training(report), figures.cost(report)) if drawing is not None]
        tables: dict[str, list[list[str]]] = {}
        summary: dict[str, Any] = {"identity_hash": ledger.header.identity_hash}
        for kind, (at, digests) in _last_digests(ledger).items():
            whole, groups = summaries(tuple(digests), tuple(digests.values()))
            summary |= {f"{kind}_step": at, f"{kind}_digest": whole}
            tables[kind] = [list(row) for row in groups.items()]
        file = None
        if self._done:
            file = folder / f"{self.run_dir.path.resolve().name}{certificate.SUFFIX}"
            file.write_bytes(certificate.certify(self.run_dir.path, attempts.completed(self.run_dir)))
            summary["certificate_hash"] = certificate.check(file).hash
        return Sent(
            {drawing.name: (drawing.title, render.png([drawing])) for drawing in drawings},
            tables,
            summary,
            file,
            step,
        )


def _to_wandb(wandb: Any, sent: Sent) -> None:
    """wandb: the module, as Bridge hands it out."""
    from PIL import Image

    logged: dict[str, Any] = {}
    for name, (title, png) in sent.figures.items():
        logged[f"{PREFIX}/{name}"] = wandb.Image(Image.open(io.BytesIO(png)), caption=title)
    for kind, rows in sent.tables.items():
        logged[f"{PREFIX}/{kind}"] = wandb.Table(columns=["group", "digest"], data=rows)
    wandb.log(logged, step=sent.step)
    wandb.run.summary.update({f"{PREFIX}/{name}": value for name, value in sent.summary.items()})
    if sent.certificate is not None:
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", sent.certificate.name), type="certificate")
        artifact.add_file(str(sent.certificate), name=sent.certificate.name)
        wandb.log_artifact(artifact)


def _to_mlflow(mlflow: Any, sent: Sent) -> None:
    """mlflow: the module, as Bridge hands it out, with an active run."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, png) in sent.figures.items():
            file = Path(folder, f"{name}.png")
            file.write_bytes(png)
            mlflow.log_artifact(str(file), artifact_path=PREFIX)
    for kind, rows in sent.tables.items():
        text = "".join(f"{group}\t{digest}\n" for group, digest in rows)
        mlflow.log_text(text, f"{PREFIX}/{kind}.tsv")
    mlflow.set_tags({f"{PREFIX}.{name}": str(value) for name, value in sent.summary.items()})
    if sent.certificate is not None:
        mlflow.log_artifact(str(sent.certificate), artifact_path="certificate")


def _to_comet(experiment: Any, sent: Sent) -> None:
    """experiment: Comet's, as Bridge hands it out."""
    for name, (_, png) in sent.figures.items():
        experiment.log_image(io.BytesIO(png), name=f"{PREFIX}/{name}", step=sent.step)
    for kind, rows in sent.tables.items():
        experiment.log_table(f"{PREFIX}-{kind}.csv", tabular_data=rows, headers=["group", "digest"])
    experiment.log_others({f"{PREFIX}/{name}": value for name, value in sent.summary.items()})
    if sent.certificate is not None:
        experiment.log_asset(str(sent.certificate), file_name=sent.certificate.name, copy_to_tmp=True)


# Where Bridge keeps a logger -> whose it is, and what sends.
SENDERS: dict[str, tuple[str, Callable[[Any, Sent], None]]] = {
    "wandb_logger": ("Weights & Biases", _to_wandb),
    "mlflow_logger": ("MLflow", _to_mlflow),
    "comet_logger": ("Comet", _to_comet),
}


@contextmanager
def offline(config: RunConfig, run_dir: RunDir) -> Iterator[None]:
    """Keep what `logging=comet` logs in the run directory where no key is set: Bridge's Experiment ends without."""
    if config.logging.kind != "comet" or "COMET_API_KEY" in os.environ:
        yield
        return
    run_dir.comet.mkdir(exist_ok=True)
    folder = str(run_dir.comet)
    row = Replacement(
        "comet_ml:Experiment",
        lambda original: partial(resolve_name("comet_ml:OfflineExperiment"), offline_directory=folder),
        "an Experiment needs a key",
    )
    with applied((row,)):
        yield


def _quietly(title: str, end: Callable[[], Any]) -> None:
    try:
        end()
    except Exception:
        traceback.print_exc()
        print(f"warning: the run at {title} did not end well", file=sys.stderr)


def _last_digests(ledger: Ledger) -> dict[str, tuple[int, Mapping[str, str]]]:
    """Map gradients and weights to the last step with digests, and these; a kind without any is absent."""
    digested = {kind: [s for s in ledger.steps if getattr(s, kind) is not None] for kind in DIGESTED}
    return {kind: (steps[-1].step, getattr(steps[-1], kind)) for kind, steps in digested.items() if steps}
