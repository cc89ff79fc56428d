"""Reports of real runs: `tpi report`, and the figures that go to Weights & Biases, on which no run depends."""

from types import SimpleNamespace
from unittest import mock

import pytest

from tests.forks import freeze
from tp_invariant_recipes.features.train.experiment_report import ExperimentReport
from tp_invariant_recipes.ledger.certificate import check
from tp_invariant_recipes.ledger.digests import summaries
from tp_invariant_recipes.ledger.open import read
from tp_invariant_recipes.runs.run_dir import RunDir

RUN = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1", "iters=2", "numerics=stock")


def sent(run, steps):
    """What the callback gives the module wandb at the end of step 2, as calls of a mock."""
    logger = mock.Mock(**{"Image.side_effect": lambda image, caption: (image.size, caption)}, run=mock.Mock(summary={}))
    state = SimpleNamespace(wandb_logger=logger, train_state=SimpleNamespace(step=2))
    ExperimentReport(RunDir(run), steps).on_train_end(SimpleNamespace(state=state))
    return logger


KINDS = ("clipped", "gradients", "masters", "moments")  # of digests that a run in bf16 has


@pytest.fixture(scope="module")
def run(shared):
    """A run with ledger digests and without Weights & Biases."""
    shared(*RUN, "run.dir=run", status=0)
    return shared.folder / "run"


@pytest.mark.release
def test_a_certificate_is_reported_like_the_run(run, shared):
    assert shared("certify", "run", "--out", "run.cert").status == 0
    done = shared("report", "run.cert", "run", "--no-png", status=0)
    assert "B run: identical: 2 steps, " in done.stdout
    html = (shared.folder / "report.html").read_text()
    assert "A run.cert" in html
    assert "A run.cert: the median step took" not in html  # a certificate has no times
    assert "B run: the median step took" in html


@pytest.fixture(scope="module")
def wandb(bridge):
    """Imported once here, and not in every fork."""
    import wandb

    assert wandb.Image  # which imports it: it waits until somebody asks for it
    freeze()


@pytest.mark.release
@pytest.mark.usefixtures("wandb")
def test_figures_reach_an_offline_run(tpi):
    """Offline, since there is no key: the environment of tests holds none."""
    done = tpi(*RUN, "tp=2", "logging=wandb", "run.dir=run", status=0)
    (kept,) = (tpi.folder / "run/wandb").glob("offline-run-*")
    assert f"wandb sync run/wandb/{kept.name}\n" in done.stderr
    assert "warning" not in (tpi.folder / "run/logs/rank-1.log").read_text()
    (files,) = (tpi.folder / "run/wandb").glob("offline-run-*/files/media")
    images, tables = files / "images/ledger", files / "table/ledger"
    assert sorted(file.name.split("_")[0] for file in images.iterdir()) == ["cost", "training"]
    assert sorted(file.name.split("_")[0] for file in tables.iterdir()) == list(KINDS)


@pytest.mark.release
def test_figures_tables_and_summary_are_those_of_the_ledger(run, shared):
    logger, ledger = sent(run, 2), read(run)
    logged = {name: value for call in logger.log.call_args_list for name, value in call.args[0].items()}
    assert {call.kwargs["step"] for call in logger.log.call_args_list} == {2}
    assert set(logged) == {f"ledger/{name}" for name in ("training", "cost", *KINDS)}
    (width, height), caption = logged["ledger/training"]
    assert width == 1188
    assert height > 500
    assert caption == "Loss, gradient norm and learning rate"
    tables = [call.kwargs for call in logger.Table.call_args_list]
    assert [table["columns"] for table in tables] == [["group", "digest"]] * len(KINDS)
    assert [group for group, _ in tables[0]["data"]][:2] == ["embedding.word_embeddings", "decoder.layers.0"]
    shared("certify", "run", "--out", "sent.cert", status=0)
    logger.Artifact.assert_called_once_with("run.tpicert", type="certificate")
    logger.log_artifact.assert_called_once_with(logger.Artifact.return_value)
    last = {kind: getattr(ledger.steps[-1], kind) for kind in KINDS}
    assert logger.run.summary == {
        "ledger/identity_hash": ledger.header.identity_hash,
        "ledger/certificate_hash": check(shared.folder / "sent.cert").hash,
        **{f"ledger/{kind}_step": 2 for kind in KINDS},
        **{
            f"ledger/{kind}_digest": summaries(tuple(digests), tuple(digests.values()))[0]
            for kind, digests in last.items()
        },
    }


def test_without_a_logger_nothing_is_read(tmp_path):
    state = SimpleNamespace(wandb_logger=None, train_state=SimpleNamespace(step=2))
    ExperimentReport(RunDir(tmp_path / "none"), 2).on_train_end(SimpleNamespace(state=state))


@pytest.mark.release
@pytest.mark.usefixtures("wandb")
def test_what_goes_wrong_is_a_warning_in_the_log_of_the_rank(tpi):
    def plant() -> None:
        import wandb

        def fail(*_, **__):
            raise OSError("no such service")

        wandb.Image = fail

    tpi(*RUN, "logging=wandb", "run.dir=run", before=plant, status=0)
    assert len(tpi.ledger("run")) == 2
    log = (tpi.folder / "run/logs/rank-0.log").read_text()
    assert "OSError: no such service" in log
    assert "warning: the figures of the ledger did not reach Weights & Biases" in log


@pytest.mark.release
def test_a_run_before_its_last_step_has_no_certificate(run):
    logger = sent(run, 3)
    assert logger.log.called
    assert not logger.Artifact.called
