# SPDX-License-Identifier: Apache-2.0
"""Runs of earlier versions say numerics=stock of what is numerics=deterministic now."""

import pytest

from tp_invariant_recipes.launch import resume, trust
from tp_invariant_recipes.ledger.run_files import RunFile
from tp_invariant_recipes.runs.run_dir import RunDir


@pytest.mark.parametrize("deterministic, repeated", ((True, "numerics=deterministic"), (None, "numerics=stock")))
def test_a_deterministic_stock_run_is_repeated_so(tmp_path, monkeypatch, deterministic, repeated):
    monkeypatch.setattr(trust, "require", lambda *args, **keywords: None)
    run = RunDir(tmp_path)
    model = {} if deterministic is None else {"deterministic_mode": deterministic}
    run.write(run.config, {"model": model, "numerics": {"mode": "stock"}})
    before = RunFile(
        model="qwen3_toy", overrides=("numerics=stock", "tp=2"), device="cpu", layout={}, numerics={"mode": "stock"},
        identity={}, identity_hash="0" * 64, attempts=(),
    )  # fmt: skip
    words = [override.text for override in resume.overrides_to_repeat(run, before, [])]
    assert {repeated, "tp=2"} <= {*words}
    assert sum(word.startswith("numerics") for word in words) == 1
