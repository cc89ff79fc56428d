"""`tpi report` of real runs."""

import pytest

RUN = ("train", "qwen3_toy", "model.num_layers=1", "seq=32", "gbs=1", "iters=2", "numerics=stock")


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
