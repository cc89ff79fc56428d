"""The shipped table of `tpi models` is what the models compose to."""

import json

import pytest

from tp_invariant_recipes.config import describe
from tp_invariant_recipes.settings import conf_files, field_table


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
