# SPDX-License-Identifier: Apache-2.0
"""Logging to Weights & Biases, MLflow or Comet: one run of the service for all attempts, and the run's verdict.

Bridge's loggers send the curves and their configuration. All attempts at a run log to one run of a service: its id
stays in `RunDir.tracking`.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import Any

from tp_invariant_recipes.ledger.digests import summaries
from tp_invariant_recipes.ledger.open import streamed
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.ledger.schema import DIGESTED
from tp_invariant_recipes.replacement import Replacement, applied
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.run_config import RunConfig

# A service -> the id of its run, and what sends the verdict there, each given what Bridge keeps as its logger.
SENDERS: dict[str, tuple[Callable[[Any], str], Callable[[Any, dict[str, Any]], Any]]] = {
    "wandb": (lambda wandb: wandb.run.id, lambda wandb, facts: wandb.run.summary.update(facts)),
    "mlflow": (lambda mlflow: mlflow.active_run().info.run_id, lambda mlflow, facts: mlflow.set_tags(facts)),
    "comet": (lambda experiment: experiment.get_key(), lambda experiment, facts: experiment.log_others(facts)),
}
MLFLOW_STATUS = {"failed": "FAILED", "stopped": "KILLED", "completed": "FINISHED"}


@contextmanager
def continued(config: RunConfig, run_dir: RunDir) -> Iterator[None]:
    """Have Bridge's logger continue the run that an earlier attempt began, and Comet's work without a key, offline."""
    kind, rows = config.logging.kind, []
    known, offline = run_dir.tracked().get(kind), "COMET_API_KEY" not in os.environ
    if kind == "wandb" and known:
        os.environ |= {"WANDB_RUN_ID": known, "WANDB_RESUME": "allow"}
    elif kind == "mlflow" and known:
        os.environ["MLFLOW_RUN_ID"] = known
        rows.append(Replacement("mlflow:log_params", _new_params, "MLflow refuses a second value of a parameter"))
    elif kind == "comet" and (known or offline):
        given: dict[str, str] = {"previous_experiment": known} if known else {}
        if offline:
            run_dir.comet.mkdir(exist_ok=True)
            given["offline_directory"] = str(run_dir.comet)
        name = f"{'Existing' if known else ''}{'Offline' if offline else ''}Experiment"
        make = partial(resolve_name(f"comet_ml:{name}"), **given)
        rows.append(Replacement("comet_ml:Experiment", lambda original: make, "an Experiment is new and needs a key"))
    with applied(rows):
        yield


def _new_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(params: dict[str, Any]) -> None:
        import mlflow

        active: Any = mlflow.active_run()
        logged = mlflow.get_run(active.info.run_id).data.params
        original({name: value for name, value in params.items() if name not in logged})

    return log


class Verdict:
    """The callback of the last rank, which has Bridge's loggers: it keeps the ids of their runs, and sends the verdict.

    A service that fails costs a warning in the rank's log: the run's ledger is on the disk.
    """

    def __init__(self, run_dir: RunDir, config: RunConfig) -> None:
        self.run_dir, self.service, self.steps = run_dir, config.logging.kind, config.train["train_iters"]
        self.outcome, self.logger = "failed", None

    def on_train_start(self, context: Any) -> None:
        """Keep the id before anything can fail: the next attempt needs it."""
        self.logger = getattr(context.state, f"{self.service}_logger", None) if self.service in SENDERS else None
        if self.logger is not None:
            run_id = SENDERS[self.service][0](self.logger)
            self.run_dir.write(self.run_dir.tracking, self.run_dir.tracked() | {self.service: run_id})

    def on_train_end(self, context: Any) -> None:
        """Send the verdict of a run whose steps are all made."""
        self.on_leave(context.state)

    def on_leave(self, state: Any) -> None:
        """Send the verdict, before Bridge ends the run of wandb and of Comet."""
        step = state.train_state.step
        self.outcome = "completed" if step == self.steps else "stopped"
        if self.logger is not None:
            with _warned(self.service):
                run = self.run_dir.read_run(RunFile)
                facts: dict[str, Any] = {"outcome": self.outcome, "step": step, "identity_hash": run.identity_hash}
                facts |= {"model": run.model, "layout": str(run.layout), "numerics": str(run.numerics.get("mode"))}
                last = streamed(self.run_dir.ledger).steps[-1]
                for kind in DIGESTED if last.step == step else ():
                    if (digests := getattr(last, kind)) is not None:
                        facts[f"{kind}_digest"] = summaries(tuple(digests), tuple(digests.values()))[0]
                SENDERS[self.service][1](self.logger, {f"tpi/{name}": fact for name, fact in facts.items()})

    def close(self) -> None:
        """End the run of MLflow and Comet, which otherwise end when an interpreter exits; a killed one does not."""
        if (mlflow := sys.modules.get("mlflow")) is not None and mlflow.active_run() is not None:
            with _warned("mlflow"):
                mlflow.end_run(MLFLOW_STATUS[self.outcome])
        if self.service == "comet" and self.logger is not None:
            with _warned("comet"):
                self.logger.end()


@contextmanager
def _warned(service: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        traceback.print_exc()
        print(f"warning: the verdict of the run did not reach {service}", file=sys.stderr)
