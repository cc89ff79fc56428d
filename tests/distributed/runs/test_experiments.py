"""Runs that log to MLflow and to Comet, without a server and without a key, and their certificates there."""

import json
import zipfile

import pytest

from tp_invariant_recipes.ledger.certificate import check
from tp_invariant_recipes.ledger.open import read

RUN = ("train", "qwen3_toy", "seq=64", "gbs=2", "iters=2", "numerics=stock")


@pytest.fixture
def no_servers(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "COMET_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.release
def test_mlflow_keeps_curves_figures_and_the_certificate_in_files(tpi, no_servers):
    done = tpi(*RUN, "tp=2", "logging=mlflow", "project=ours", "name=first", "run.dir=run", status=0)
    assert "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri run/mlflow\n" in done.stderr
    assert "warning: the" not in (tpi.folder / "run/logs/rank-1.log").read_text()
    (experiment,) = (p.parent for p in (tpi.folder / "run/mlflow").glob("*/meta.yaml") if "name: ours" in p.read_text())
    (kept,) = (path for path in experiment.iterdir() if path.is_dir() and (path / "tags").exists())
    assert "status: 3\n" in (kept / "meta.yaml").read_text()  # FINISHED
    assert (kept / "tags/mlflow.runName").read_text() == "first"
    losses = [line.split() for line in (kept / "metrics/lm loss").read_text().splitlines()]
    assert [int(step) for _, _, step in losses] == [1, 2]
    ledger = read(tpi.folder / "run")
    assert (kept / "tags/ledger.identity_hash").read_text() == ledger.header.identity_hash
    sent = sorted(path.name for path in (kept / "artifacts/ledger").iterdir())
    assert sent == ["clipped.tsv", "cost.png", "gradients.tsv", "masters.tsv", "moments.tsv", "training.png"]
    assert tpi("certify", "run", "--out", "run.tpicert").status == 0
    certificate = kept / "artifacts/certificate/run.tpicert"
    assert certificate.read_bytes() == (tpi.folder / "run.tpicert").read_bytes()
    assert (kept / "tags/ledger.certificate_hash").read_text() == check(certificate).hash


@pytest.mark.release
def test_comet_without_a_key_keeps_an_archive(tpi, no_servers):
    done = tpi(*RUN, "logging=comet", "project=ours", "run.dir=run", status=0)
    (kept,) = (tpi.folder / "run/comet").glob("*.zip")
    assert f"comet upload run/comet/{kept.name}\n" in done.stderr
    assert "warning: the" not in (tpi.folder / "run/logs/rank-0.log").read_text()
    with zipfile.ZipFile(kept) as archive:
        message = json.loads(archive.read("experiment.json"))
        messages = archive.read("messages.json").decode()
        files = [archive.read(name) for name in archive.namelist()]
    assert message["project_name"] == "ours"
    assert '"lm loss"' in messages
    assert read(tpi.folder / "run").header.identity_hash in messages
    assert tpi("certify", "run", "--out", "run.tpicert").status == 0
    assert (tpi.folder / "run.tpicert").read_bytes() in files
