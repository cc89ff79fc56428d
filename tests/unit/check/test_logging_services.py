# SPDX-License-Identifier: Apache-2.0
"""`logging=wandb`, `mlflow` and `comet`: what a run needs for them, fills in and refuses, and the lines at its end."""

import pytest

from tp_invariant_recipes.check.hosts.machine import RULES, PendingRun
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.launch import plan
from tp_invariant_recipes.runs.run_dir import RunDir
from tp_invariant_recipes.settings.field_table import SERVICES
from tp_invariant_recipes.start import needed

VARIABLES = ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "COMET_API_KEY")


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def filled(tmp_path, *words: str) -> tuple[dict, dict[str, str]]:
    composed = compose("qwen3_toy", words, device="cpu")
    fields = plan.logger_fields(composed.config, RunDir(tmp_path / "run"))
    return composed.config.section("logger") | fields, plan.logger_variables(composed.config)


@pytest.mark.parametrize("kind", SERVICES)
def test_project_and_name_go_where_bridge_reads_them(tmp_path, kind):
    project, run_name = SERVICES[kind].project, SERVICES[kind].run_name
    logger, _ = filled(tmp_path, f"logging={kind}")
    assert (logger[project], logger[run_name]) == ("tp-invariant-recipes", "run")
    logger, _ = filled(tmp_path, f"logging={kind}", "project=ours", "name=first")
    assert (logger[project], logger[run_name]) == ("ours", "first")


def test_without_a_server_all_stays_in_the_run_directory(tmp_path, monkeypatch):
    logger, variables = filled(tmp_path, "logging=mlflow")
    store = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    assert (logger["mlflow_tracking_uri"], variables) == (str(tmp_path / "run" / "mlflow"), store)
    assert filled(tmp_path, "logging=wandb")[1] == {"WANDB_MODE": "offline"}
    address = "logger.mlflow_tracking_uri=http://mlflow.example.com:5000"
    logger, variables = filled(tmp_path, "logging=mlflow", address)
    assert (logger["mlflow_tracking_uri"], variables) == ("http://mlflow.example.com:5000", store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example.com")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    logger, variables = filled(tmp_path, "logging=mlflow")
    assert (logger.get("mlflow_tracking_uri"), variables) == (None, store)
    assert filled(tmp_path, "logging=wandb")[1] == {}


@pytest.mark.parametrize("kind", SERVICES)
def test_a_missing_package_is_one_sentence(monkeypatch, kind):
    config = compose("qwen3_toy", [f"logging={kind}"], device="cpu").config
    assert broken_rules(PendingRun(config), RULES) == []
    monkeypatch.setattr(needed, "there", lambda module: module != SERVICES[kind].module)
    (problem,) = map(str, broken_rules(PendingRun(config), RULES))
    assert problem.startswith(f"logging={kind} needs {needed.DISTRIBUTIONS[SERVICES[kind].module]}, which")
    assert f"pip install 'tp-invariant-recipes[{SERVICES[kind].extra}]'" in problem
