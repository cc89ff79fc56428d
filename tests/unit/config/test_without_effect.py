# SPDX-License-Identifier: Apache-2.0
"""Of several spellings of a key the last counts, and defaults take what is legal."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import changed, latest, parse_all, texts
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.features.verify import workflow as verify


def test_a_resumed_run_may_spell_a_key_in_another_way():
    kept = latest(parse_all(["parallel.data_parallel_size=2", "seq=32", "dp=4"]))
    assert texts(kept) == ("seq=32", "dp=4")


def test_a_command_that_changes_a_run_counts_however_a_key_is_spelled():
    words = ["dp=2", "seq=32", "model.tensor_model_parallel_size=4"]
    assert texts(changed(words, ["tp=2", "parallel.data_parallel_size=1"])) == (
        "seq=32",
        "tp=2",
        "parallel.data_parallel_size=1",
    )


@pytest.mark.parametrize(
    "model, overrides, shards",
    (
        ("qwen3_toy", "precision=fp8_tensorwise seq=128", 8),
        ("qwen3_toy", "cp=2 seq=8", 4),  # a context shard is two chunks, and V of them
        ("qwen3_toy", "model.ffn_hidden_size=64", 2),  # rows of 32 numbers on a CPU
        ("gpt_oss_20b", "", 2),
        ("moonlight_toy", "precision=fp8_tensorwise seq=128", 8),
    ),
)
def test_v_is_the_largest_that_every_rule_takes(model, overrides, shards):
    words = overrides.split()
    assert compose(model, words, device="cpu").config.numerics.virtual_shards == shards
    if shards < 8:
        with pytest.raises(ConfigError):
            compose(model, [*words, f"numerics.virtual_shards={2 * shards}"], device="cpu")


def cells(tmp_path, *words: str) -> dict[str, int]:
    """V of each cell of a matrix."""
    planned = verify.new("qwen3_toy", ["device=cpu", *words], against=None, directory=tmp_path / "matrix")
    return {cell.label: cell.numerics["virtual_shards"] for cell in planned.cells}


def test_verify_gives_all_cells_the_shards_that_the_largest_needs(tmp_path, no_gpus):
    assert cells(tmp_path, "tp=1,2", "precision=fp8_tensorwise", "seq=128") == {"tp=1": 8, "tp=2": 8}
    wide = ("model.num_attention_heads=16", "model.num_query_groups=16", "model.ffn_hidden_size=512", "seq=512")
    assert cells(tmp_path, "tp=1,16", *wide) == {"tp=1": 16, "tp=16": 16}
    assert cells(tmp_path, "cp=1,2", "seq=8") == {"cp=1": 4, "cp=2": 4}
