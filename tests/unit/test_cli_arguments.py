"""What the shell offers after `tpi train …<TAB>`."""

import pytest

from tp_invariant_recipes.cli.arguments import _models, _overrides
from tp_invariant_recipes.config import source
from tp_invariant_recipes.config.keys import SHORT_KEYS


def test_models_with_what_they_are():
    assert [name for name, _ in _models("")] == list(source.groups()["model"])
    assert _models("qwen3_8") == [("qwen3_8b", "Qwen3-8B: 36 layers, untied embeddings.")]
    assert _models("gpt") == []


def test_overrides_are_short_keys_and_groups():
    offered = dict(_overrides(""))
    assert {f"{key}=" for key in SHORT_KEYS} <= offered.keys()
    groups = source.groups()
    assert offered.keys() - {f"{key}=" for key in SHORT_KEYS} == {
        f"{group}={option}" for group, options in groups.items() for option in options if group != "model"
    }
    assert offered["tp="] == "tensor-parallel degree"
    assert offered["data=mock"] == "Megatron's MockGPTDataset: tokens from a seeded generator."


def test_overrides_that_begin_as_typed():
    assert [text for text, _ in _overrides("device")] == ["device=cpu", "device=gpu"]
    assert [text for text, _ in _overrides("se")] == ["seq=", "seed="]


@pytest.mark.parametrize("command", ("train", "show"))
@pytest.mark.parametrize(
    "words, offered", (("qwen3_8", ["qwen3_8b"]), ("qwen3_8b tp=2 device=", ["device=cpu", "device=gpu"]))
)
def test_bash_is_offered_them(cli, monkeypatch, command, words, offered):
    typed = f"tpi {command} {words}"
    monkeypatch.setenv("_TPI_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert cli().out.split() == offered
