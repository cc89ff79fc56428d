"""Windows of attention and YaRN's positions under `numerics=tree`: one ledger for all layouts."""

from tests.distributed.one_ledger import train

PLAIN = ("qwen3_toy", "seq=32", "gbs=1", "iters=2", "numerics.initial_weights=invariant")
BOTH = (
    *PLAIN,
    "model.window_size=[7,0]",
    "model.window_attn_skip_freq=2",
    "model.position_embedding_type=yarn",
    "model.yarn_rotary_scaling_factor=32.0",
    "model.yarn_original_max_position_embeddings=16",
    "model.yarn_beta_fast=32.0",
    "model.yarn_beta_slow=1.0",
    "model.yarn_correction_range_round_to_int=false",
)


def _train(tpi, words, numerics, tp):
    run = f"{numerics}-{len(words)}-{tp}"
    return train(tpi, (*words, f"numerics={numerics}", f"tp={tp}"), run)


def test_one_ledger_for_all_layouts(tpi):
    one, two = (_train(tpi, BOTH, "tree", tp) for tp in (1, 2))
    assert one == two
    assert one[0].loss != _train(tpi, PLAIN, "tree", 1)[0].loss  # the settings count


def test_stock_has_several(tpi):
    one, two = (_train(tpi, BOTH, "stock", tp) for tp in (1, 2))
    assert one != two


def test_yarn_is_refused_with_context_shards(tpi):
    refused = tpi("train", *BOTH, "numerics.context_shards=2", "run.dir=refused")
    assert refused.status == 2
    assert "YaRN has no version with context shards; cp=1" in refused.stderr
