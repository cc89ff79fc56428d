# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share."""

import pytest

from tp_invariant_recipes.cli.arguments import of_model, with_config
from tp_invariant_recipes.config.overrides import words_of_file
from tp_invariant_recipes.errors import ConfigError


def test_a_recipe_has_the_whole_path_of_its_file(tmp_path, monkeypatch):
    """A job reads it in another directory."""
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert of_model("recipe=mine.py:small") == f"recipe={tmp_path / 'mine.py'}:small"


@pytest.mark.parametrize("model", (None, "qwen3_toy", "weights=folder"))
def test_another_model_is_as_typed(model):
    assert of_model(model) == model


FILE = """\
# of a project
tp: 4
guard: off
optimizer: {lr: 1e-3, adam_eps: 1.0e-8}
data:
  json_key: "null"
logging.name: run#1 é
model: {window_size: [127, 0], num_layers: ~}
cluster: {mounts: ["/a:/b", c], environment: {A: 010}}
dataset.split: 98,1,1
seq: 64,128
"""
WORDS = [
    *("tp=4", "guard=off", "optimizer.lr=1e-3", "optimizer.adam_eps=1.0e-8", 'data.json_key="null"'),
    *("logging.name=run#1 é", "model.window_size=[127,0]", "model.num_layers=null"),
    *('cluster.mounts=["/a:/b",c]', "cluster.environment.A=010", "dataset.split=98,1,1", "seq=64,128"),
]


def test_a_file_has_the_words_that_one_would_type(tmp_path):
    (tmp_path / "mine.yaml").write_text(FILE)
    assert words_of_file(tmp_path / "mine.yaml") == WORDS


@pytest.mark.parametrize(
    "text, says",
    (
        ("tp: 2\ntp: 4\n", "tp stands there twice"), ("tp: [1\n", "expected ',' or ']'"),
        ("- tp=2\n", "not a mapping of keys to values"), (None, "No such file or directory"),
    ),
)  # fmt: skip
def test_a_file_that_is_none_is_named(tmp_path, text, says):
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--config {file}: ") as refused:
        words_of_file(file)
    assert says in str(refused.value)


def test_what_is_typed_wins_over_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("tp: 4\noptimizer: {lr: 1}\nnumerics: stock\n")
    command = with_config(lambda overrides, model=None: (model, overrides))
    config = tmp_path / "mine.yaml"
    assert command(config=config, overrides=["lr=2", "numerics.mode=tree"])[1] == ["tp=4", "lr=2", "numerics.mode=tree"]
    # Beside --resume, typer gives the first word to MODEL.
    assert command(config=config, model="tp=2", overrides=None) == ("tp=2", ["optimizer.lr=1", "numerics=stock"])


def test_one_message_has_the_mistakes_of_the_file_and_of_the_words(cli, tmp_path):
    (tmp_path / "mine.yaml").write_text("tpp: 4\noptimizer: {lr: fast}\nname: ok\n")
    ended = cli("show", "qwen3_toy", "--config", tmp_path / "mine.yaml", "pp=3")
    assert ended.status == 2
    for problem in ("tpp=4: unknown key", "optimizer.lr=fast: ", "pp=3 does not divide"):
        assert problem in ended.err


@pytest.mark.parametrize("command", ("train", "verify", "audit", "bench", "show", "submit", "score", "generate"))
def test_every_command_with_overrides_takes_a_file(cli, command):
    assert "--config" in cli(command, "--help").out
