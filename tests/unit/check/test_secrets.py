# SPDX-License-Identifier: Apache-2.0
"""Secrets are told by their values; a refusal names the key, and no message repeats the value."""

from types import SimpleNamespace

import pytest

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.check.configuration import SECRET_RULES
from tp_invariant_recipes.check.rule import broken_rules
from tp_invariant_recipes.settings import secrets

PASSWORD = "hunter2x"
TOKEN = "hf_" + "aB3" * 12

# Text -> what is left of it.
HOLD = {
    f"http://u:{PASSWORD}@proxy:3128": "http://…@proxy:3128",
    f"mlflow+https://me:{PASSWORD}@host/a": "mlflow+https://…@host/a",
    f"https://hooks.example.com/x?a=1&token={PASSWORD}": "https://hooks.example.com/x?a=1&token=…",
    f"export WANDB_API_KEY={PASSWORD}": "export WANDB_API_KEY=…",
    f"export MY_TOKEN='{PASSWORD}'": "export MY_TOKEN='…'",
    f"--comment --password {PASSWORD}": "--comment --password …",
    f"curl -H 'Authorization: Bearer {TOKEN}'": "curl -H 'Authorization: Bearer …'",
    f"logger.comet_api_key={PASSWORD}: unknown": "logger.comet_api_key=… unknown",
    TOKEN: "…",
    "AKIA" + "Z" * 16: "…",
    "sk-" + "a1" * 18: "…",
    f"https://{'a1' * 12}@host/a": "https://…@host/a",
    f"https://host/a?X-Amz-Signature={'0f' * 16}": "https://host/a?X-Amz-Signature=…",
    f"wandb login {'0f' * 20}": "wandb login …",
    f"docker login -u me -p {PASSWORD} host": "docker login -u me -p … host",
    f"curl -s -u me:{PASSWORD} https://x": "curl -s -u me:… https://x",
    f"curl -H 'X-Api-Key: {PASSWORD}'": "curl -H 'X-Api-Key: …'",
    f"password: {PASSWORD}": "password: …",
    f"MYSQL_PWD={PASSWORD} SSHPASS={PASSWORD}": "MYSQL_PWD=… SSHPASS=…",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{'a1' * 20}": "…",
    "SK" + "0f" * 16: "…",  # this and the next: of detect-secrets alone
    "sk_live_" + "a1" * 12: "…",
    "-----BEGIN PRIVATE KEY-----\nabc": "-----BEGIN PRIVATE KEY-----…",
}
HARMLESS = (
    *("export HF_TOKEN=$(cat ~/.token)", "export X_TOKEN=$TOKEN", "export HF_TOKEN=/run/token", "data.json_key=text"),
    *(
        "tokenizer.eos_token=<eos>", "model.moe_token_dispatcher_type=alltoall", "git@github.com:a/b",
        "ssh://git@host/x",
    ),
    *("sqlite:////a/b", "['/a:/b:ro']", "--batch-tokens 0", "docker://nvcr.io#nvidia/pytorch:25.01", "--pass=1"),
    *(
        "module load cuda/13", "http://10.0.0.1:8080/p@th", "first pass: decoder", "export PWD=/x", "wandb login",
        "cluster.forward=[WANDB_API_KEY]",
    ),
    *("/data/" + "0f" * 20, "0f" * 20),
)  # fmt: skip


@pytest.mark.parametrize("text", HOLD)
def test_a_secret_is_cut(text):
    assert secrets.holds(text)
    assert secrets.redacted(text) == HOLD[text]


@pytest.mark.parametrize("text", HARMLESS)
def test_nothing_else_is(text):
    assert not secrets.holds(text)
    assert secrets.redacted(text) == text


CONFIGURED = (
    (f"cluster.environment.HTTPS_PROXY=http://u:{PASSWORD}@proxy:1", "cluster.environment.HTTPS_PROXY: holds"),
    (f"cluster.environment.HF_AUTH={PASSWORD}", "cluster.environment.HF_AUTH: looks like a secret"),
    (f"slurm.setup=['export WANDB_API_KEY={PASSWORD}']", "slurm.setup: holds"),
    (f"slurm.options=['--comment=token={PASSWORD}']", "slurm.options: holds"),
    (f"run.dir={TOKEN}", "run.dir: holds"),
    (f"logger.comet_api_key={PASSWORD}", "logger.comet_api_key: a secret"),
)


@pytest.mark.parametrize("override, says", CONFIGURED)
def test_what_is_configured_holds_none(override, says):
    (problem,) = problems_of(override)
    assert problem.startswith(says)
    assert "cluster.forward" in problem
    assert PASSWORD not in problem
    assert TOKEN not in problem


@pytest.mark.parametrize(
    "tags, key", (({"db_password": PASSWORD}, "db_password"), ({"a": f"http://u:{PASSWORD}@h"}, "a"))
)
def test_tags_of_mlflow_hold_none(tags, key):
    sections = {"logger": {"mlflow_tags": tags | {"team": "ours"}}}
    (problem,) = map(str, broken_rules(SimpleNamespace(sections=sections), SECRET_RULES))
    assert problem.startswith(f"logger.mlflow_tags.{key}: holds what looks like a secret")
    assert PASSWORD not in problem


@pytest.mark.parametrize("override", (f"loger.comet_api_key={PASSWORD}", f"tp=http://u:{PASSWORD}@h"))
def test_no_other_refusal_repeats_one(cli, tmp_path, monkeypatch, override):
    monkeypatch.chdir(tmp_path)
    ended = cli("train", "qwen3_toy", override)
    assert ended.status == 2
    assert "…" in ended.err
    assert PASSWORD not in ended.out + ended.err
    assert not list(tmp_path.rglob("*.json"))


def test_a_configuration_of_others_is_written_without_them():
    given = {"logger": {"comet_api_key": PASSWORD, "tags": [f"http://u:{PASSWORD}@h"], "comet_project": "p"}, "n": [1]}
    result = secrets.without(given | {"data": {"json_key": "text"}})
    assert result == {
        "logger": {"comet_api_key": "…", "tags": ["http://…@h"], "comet_project": "p"},
        "n": [1],
        "data": {"json_key": "text"},
    }


def test_names_of_secrets():
    secret = (
        "GITHUB_PAT DB_PW SSHPASS MYSQL_PWD PG_DSN HF_AUTH x.pass WANDB_API_KEY MY_TOKENIZER_TOKEN hf_token MY_SECRET"
    )
    other = "PATH PATTERN PASSES TOKENIZERS_PARALLELISM NUM_OF_TOKENS_PER_CHUNK NCCL_DEBUG"
    assert [name for name in secret.split() if not secrets.named(name)] == []
    assert [name for name in other.split() if secrets.named(name)] == []


def test_a_name_that_is_a_secret_is_not_repeated():
    config = SimpleNamespace(sections={"logger": {"mlflow_tags": {TOKEN: f"http://u:{PASSWORD}@h"}}})
    (problem,) = map(str, broken_rules(config, SECRET_RULES))
    assert TOKEN not in problem
    assert PASSWORD not in problem
