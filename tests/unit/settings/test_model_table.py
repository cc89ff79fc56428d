# SPDX-License-Identifier: Apache-2.0
"""The shipped table of `tpi models` is what the models compose to. Sizes of a model have names."""

import json

import pytest

from tp_invariant_recipes.config import describe
from tp_invariant_recipes.settings import conf_files, field_table
from tp_invariant_recipes.settings.model_shape import ModelShape


def test_the_table_has_every_model_and_its_sentence(models_table):
    assert [row["model"] for row in models_table] == list(conf_files.groups()["model"])
    for row in models_table:
        assert row["summary"] == conf_files.summary("model", row["model"])
        assert len(row["summary"]) <= 50, "with its name and parameters it is a line of 80 columns"


@pytest.mark.parametrize("name", ("qwen3_moe_toy", "deepseek_v3", "nemotron3_nano_toy", "gemma3_1b", "gpt_oss_20b"))
def test_a_row_is_what_the_model_composes_to(models_table, name):
    assert describe.model(name) in models_table


@pytest.mark.release
def test_the_table_is_that_of_scripts_model_table():
    table = describe.table()
    assert field_table.FILE.read_text(encoding="utf-8") == table
    assert json.loads(table) == field_table.rows()


DENSE = {"hidden_size": 64, "num_attention_heads": 4, "num_layers": 2, "vocab_size": 100, "seq_length": 32}


def test_what_is_unset_has_the_default_of_megatron():
    shape = ModelShape(DENSE | {"num_query_groups": None})
    assert (shape.groups, shape.head_width, shape.ffn, shape.expert_width) == (4, 16, 256, 256)
    assert (shape.experts, shape.shared_width, shape.depths, shape.pattern, shape.gates) == (0, 0, 0, "", 1)
    assert (shape.hybrid, shape.latent, shape.tied, shape.biased) == (False, False, False, False)


def test_what_is_set_is_that():
    more = {"num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 96, "num_moe_experts": 8}
    shape = ModelShape(DENSE | more | {"moe_ffn_hidden_size": 48, "gated_linear_unit": True})
    assert (shape.groups, shape.head_width, shape.ffn, shape.experts) == (2, 8, 96, 8)
    assert (shape.expert_width, shape.gates, shape.hidden, shape.sequence) == (48, 2, 64, 32)


@pytest.mark.parametrize(
    "name, field",
    (
        ("hidden", "hidden_size"), ("heads", "num_attention_heads"), ("vocabulary", "vocab_size"),
        ("sequence", "seq_length"),
    ),
)  # fmt: skip
def test_a_size_that_every_model_has_is_missed_by_its_name(name, field):
    with pytest.raises(KeyError, match=field):
        getattr(ModelShape({key: value for key, value in DENSE.items() if key != field}), name)
