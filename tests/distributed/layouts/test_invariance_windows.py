"""Windows of attention and YaRN's positions under `numerics=tree`: one ledger for all layouts."""

import pytest

from tests.distributed.scenario import STOCK, agree, unequal

PLAIN = "qwen3_toy seq=32 gbs=1 iters=1"
WINDOWS = (
    "model.window_size=[7,0]",
    "model.window_attn_skip_freq=2",
    "model.position_embedding_type=yarn",
    "model.yarn_rotary_scaling_factor=32.0",
    "model.yarn_original_max_position_embeddings=16",
    "model.yarn_beta_fast=32.0",
    "model.yarn_beta_slow=1.0",
    "model.yarn_correction_range_round_to_int=false",
)


@pytest.mark.release
def test_one_ledger_for_all_layouts(scenario):
    windows = scenario(PLAIN, *WINDOWS)
    agree(windows, ("tp=1", "tp=2"))
    assert windows("tp=1").ledger()[0].loss != scenario(PLAIN, "tp=1").ledger()[0].loss  # the settings count


@pytest.mark.release
def test_stock_has_several(scenario):
    first, second = (scenario(PLAIN, *WINDOWS, STOCK, f"tp={tp}").ledger() for tp in (1, 2))
    assert unequal(first, second)


def test_yarn_is_refused_with_context_shards(tpi):
    refused = tpi("train", *PLAIN.split(), *WINDOWS, "numerics.context_shards=2", "run.dir=refused", status=2)
    assert "YaRN has no version with context shards; cp=1" in refused.stderr
