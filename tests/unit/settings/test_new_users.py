# SPDX-License-Identifier: Apache-2.0
"""Dead ends of people who come from Megatron-LM or type a first command: each message says how to go on."""

import json
import re

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.data import examples
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.score import workflow as score
from tp_invariant_recipes.settings import conf_files, field_table, schema
from tp_invariant_recipes.settings.keys import FLAGS, SHORT_KEYS, nearest


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", overrides, device="cpu")
    return caught.value.problems


def test_every_flag_of_megatron_leads_to_a_key():
    table = field_table.read()
    classes = schema.BRIDGE_SECTIONS | {"model": schema.PROVIDERS[0]}
    own = {f"{section}.{name}" for section, cls in schema.OWN_SECTIONS.items() for name in schema.fields(cls)}
    known = own | {f"{section}.{name}" for section, path in classes.items() for name in table.get(path, ())}
    options = {f"{group}={option}" for group, names in conf_files.groups().items() for option in names}
    for flag, keys in FLAGS.items():
        for key in keys:
            assert key in options | SHORT_KEYS.keys() or key.partition("=")[0] in known, (flag, key)


GUESSES = (
    ("swiglu=true", "model.gated_linear_unit=true"),
    ("apply_layernorm_1p=true", "model.layernorm_zero_centered_gamma=true"),
    ("group_query_attention=true", "model.num_query_groups"),
    ("decoder_first_pipeline_num_layers=3", "model.num_layers_in_first_pipeline_stage"),
    ("log_interval=1", "logger.log_interval"), ("train.log_interval=1", "logger.log_interval"), ("train.lr=1", "lr"),
    ("megatron.lr=1", "lr"), ("trainer.max_steps=3", "iters"), ("run.virtual_shards=3", "numerics.virtual_shards"),
    ("model.num_layer=3", "model.num_layers"),
)  # fmt: skip


@pytest.mark.parametrize("typed, key", GUESSES, ids=[typed for typed, _ in GUESSES])
def test_a_name_of_elsewhere_leads_to_its_key(typed, key):
    (problem,) = problems(typed)
    assert problem.endswith(f"; did you mean '{key}'?")


@pytest.mark.parametrize("typed", ("qwen3_8b_pretrian_config", "qwen3_8bb_pretrain_config"))
def test_a_misspelt_recipe_keeps_its_kind(typed):
    names = [f"{model}_{kind}_config" for model in ("qwen3_8b", "qwen3_vl_8b") for kind in ("pretrain", "sft", "peft")]
    names += ["qwen3_vl_8b_pretrain_mock_config", "qwen3_8b_sft_32k_config"]
    assert nearest(typed, names) == "; did you mean 'qwen3_8b_pretrain_config'?"
    assert nearest(typed.replace("pretrian", "sftt").replace("pretrain", "sft"), names) == (
        "; did you mean 'qwen3_8b_sft_config'?"
    )


def test_score_names_every_file_that_is_unfit_before_it_reads_weights(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "plan", lambda *_: pytest.fail("the weights were read"))
    for name, text in (("bad.jsonl", "x"), ("talk.jsonl", json.dumps({"conversations": []}))):
        (tmp_path / name).write_text(text)
    files = ["--against", tmp_path / "bad.jsonl", "--out", tmp_path / "no" / "out"]
    ended = cli("score", *map(str, [tmp_path, tmp_path / "talk.jsonl", *files]))
    assert (ended.status, ended.out) == (2, "")
    text = " ".join(ended.err.split())
    for words in (
        "talk.jsonl: its first line: none of tokens, text, messages, prompt with response; its keys: 'conversations'",
        "bad.jsonl: its first line: not JSON",
        "no is no folder",
    ):
        assert words in text
    assert "[Errno" not in text


def test_a_conversation_without_preprocessing_names_the_setting(tmp_path):
    (tmp_path / "training.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    with pytest.raises(ConfigError, match=r"cfg\.dataset\.preprocessing = ChatSFTPreprocessingConfig"):
        examples.read_examples(tmp_path, ["training.jsonl"], None, ("input", "output"), chat=False)


def test_a_dry_run_that_a_machine_cannot_start_prints_the_memory(cli, no_gpus):
    ended = cli("train", "qwen3_toy", "device=gpu", "--dry-run")
    assert ended.status == 2
    first, *memory = ended.out.splitlines()
    assert first == "memory of the fullest rank, about:"
    assert memory[0].startswith("  weights")
    assert all(re.fullmatch(r"  \S.* \d+\.\d\d [MG]iB", line) for line in memory), memory
