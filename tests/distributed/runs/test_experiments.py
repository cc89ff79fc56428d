# SPDX-License-Identifier: Apache-2.0
"""Runs that log to Weights & Biases, MLflow and Comet, without a server and a key: their stops, their resumes."""

import json
import signal
import zipfile
from types import SimpleNamespace

import pytest

from tests.distributed.faults import at_step, reached, stop, wait_for_sigterm
from tests.forks import freeze
from tp_invariant_recipes.ledger.digests import summaries
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.training import experiments

RUN = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=2", "numerics=stock", "save=2", "run.dir=run")
SERVICES = ("wandb", "mlflow", pytest.param("comet", marks=pytest.mark.release))


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "COMET_API_KEY", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def wandb(bridge):
    """Imported once here, and not in every fork."""
    import wandb  # noqa: F401

    freeze()


def ids(run) -> list[str]:
    """The runs that a service has, one for each attempt where it keeps attempts offline."""
    if (run / "comet").exists():
        return [
            json.loads(zipfile.ZipFile(file).read("experiment.json"))["offline_id"]
            for file in (run / "comet").glob("*.zip")
        ]
    return [folder.name.rpartition("-")[2] for folder in (run / "wandb").glob("offline-run-*")] or [
        file.parent.parent.name for file in (run / "mlflow").glob("*/*/tags/mlflow.runName")
    ]


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("service", SERVICES)
def test_a_run_that_is_to_leave_stops_and_its_resume_is_the_same_run_of_the_service(tpi, service):
    run = tpi.folder / "run"
    stopped = tpi(*RUN, "iters=4", "train.exit_interval=2", f"logging={service}", "name=first", status=0)
    assert "error" not in stopped.stderr
    tracked = json.loads((run / "tracking.json").read_text())
    done = tpi("train", "--resume", "run", status=0)
    assert json.loads((run / "tracking.json").read_text()) == tracked
    assert {*ids(run)} == {*tracked.values()}
    assert len(tpi.ledger("run")) == 4
    assert "warning: the verdict" not in (run / "logs/rank-0.log").read_text()
    if service == "mlflow":
        assert "mlflow ui --backend-store-uri run/mlflow\n" in done.stderr
        (kept,) = (run / "mlflow").glob(f"*/{tracked[service]}")
        losses = [line.split() for line in (kept / "metrics/lm loss").read_text().splitlines()]
        assert [int(step) for _, _, step in losses] == [1, 2, 3, 4]
        assert "status: 3\n" in (kept / "meta.yaml").read_text()  # FINISHED
        assert (kept / "tags/tpi/outcome").read_text() == "completed"


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize(
    "number", (signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.release) for n in (signal.SIGUSR2, signal.SIGINT)))
)
def test_a_signal_stops_a_run_that_logs(tpi, number):
    process = tpi.start(*RUN, "iters=4", "save=0", "logging=wandb", before=at_step(2, wait_for_sigterm))
    stop(process, reached(tpi.folder, 2), number, 130 if number == signal.SIGINT else 0)


class Module:
    """A logger of wandb, as Bridge hands it out."""

    run = SimpleNamespace(id="r1", summary={})


def sent(run, step: int, service: str, logger) -> tuple[str, dict]:
    """How a run ends that Bridge leaves at this step, and what its service has of it."""
    config = SimpleNamespace(logging=SimpleNamespace(kind=service), train={"train_iters": 2})
    verdict = experiments.Verdict(RunDir(run), config)
    state = SimpleNamespace(**{f"{service}_logger": logger}, train_state=SimpleNamespace(step=step))
    verdict.on_train_start(SimpleNamespace(state=state))
    verdict.on_leave(state)
    return verdict.outcome


def test_the_verdict_has_the_digests_of_the_ledger(tpi, capsys):
    tpi(*RUN, "iters=2", status=0)
    ledger = read(tpi.folder / "run")
    assert sent(tpi.folder / "run", 2, "wandb", Module) == "completed"
    assert Module.run.summary["tpi/identity_hash"] == ledger.header.identity_hash
    digests = ledger.steps[-1].gradients
    assert Module.run.summary["tpi/gradients_digest"] == summaries(tuple(digests), tuple(digests.values()))[0]
    assert RunDir(tpi.folder / "run").tracked() == {"wandb": "r1"}
    Module.run.summary = None  # a service that fails
    assert sent(tpi.folder / "run", 1, "wandb", Module) == "stopped"
    assert "warning: the verdict of the run did not reach wandb" in capsys.readouterr().err
