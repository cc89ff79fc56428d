"""Reports of real runs: `tpi report`, and the figures that go to Weights & Biases, on which no run depends."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forks import freeze
from tp_invariant_recipes.ledger.certificate import check
from tp_invariant_recipes.ledger.digests import summaries
from tp_invariant_recipes.ledger.open import read

RUN = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1", "iters=2", "numerics=stock")


def content(file) -> bytes:
    return Path(file).read_bytes()


class Logger:
    """What the callback uses of the module wandb, keeping what it is given."""

    def __init__(self) -> None:
        self.logged: dict = {}
        self.steps: list[int] = []
        self.files: list[tuple[str, bytes]] = []
        self.artifacts: list[tuple[str, str]] = []
        self.run = SimpleNamespace(summary={})

    def Image(self, image, caption):
        return image.size, caption

    def Table(self, columns, data):
        return columns, data

    def Artifact(self, name, type):
        return SimpleNamespace(
            name=name, type=type, add_file=lambda file, name: self.files.append((name, content(file)))
        )

    def log_artifact(self, artifact):
        self.artifacts.append((artifact.name, artifact.type))

    def log(self, sent, step):
        self.logged |= sent
        self.steps.append(step)


def _context(logger, step=2):
    return SimpleNamespace(state=SimpleNamespace(wandb_logger=logger, train_state=SimpleNamespace(step=step)))


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
    from tp_invariant_recipes.features.train.experiment_report import ExperimentReport
    from tp_invariant_recipes.runs.run_dir import RunDir

    logger = Logger()
    ExperimentReport(RunDir(run), 2).on_train_end(_context(logger))
    ledger = read(run)
    assert logger.steps == [2]
    assert set(logger.logged) == {f"ledger/{name}" for name in ("training", "cost", *KINDS)}
    (width, height), caption = logger.logged["ledger/training"]
    assert width == 1188
    assert height > 500
    assert caption == "Loss, gradient norm and learning rate"
    columns, groups = logger.logged["ledger/masters"]
    assert columns == ["group", "digest"]
    assert [group for group, _ in groups][:2] == ["embedding.word_embeddings", "decoder.layers.0"]
    assert shared("certify", "run", "--out", "sent.cert").status == 0
    assert logger.files == [("run.tpicert", content(shared.folder / "sent.cert"))]
    assert logger.artifacts == [("run.tpicert", "certificate")]
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
    from tp_invariant_recipes.features.train.experiment_report import ExperimentReport
    from tp_invariant_recipes.runs.run_dir import RunDir

    ExperimentReport(RunDir(tmp_path / "none"), 2).on_train_end(_context(None))


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
    from tp_invariant_recipes.features.train.experiment_report import ExperimentReport
    from tp_invariant_recipes.runs.run_dir import RunDir

    logger = Logger()
    ExperimentReport(RunDir(run), 3).on_train_end(_context(logger))
    assert logger.steps == [2]
    assert (logger.files, logger.artifacts) == ([], [])
