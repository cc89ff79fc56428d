"""`weights=FOLDER` and `tpi export` of every family: in, out, the same bits in every layout."""

import pytest

from tests.distributed.finetuning.test_weights import FROZEN, bits, made, train

pytestmark = [pytest.mark.usefixtures("modelopt"), pytest.mark.release]

SHARDED = "gbs=4 numerics.data_shards=2"
_EXPERTS = "model.num_layers=2 model.hidden_size=128 model.num_attention_heads=8 model.num_query_groups=8 "
_EXPERTS += "model.kv_channels=16 model.moe_ffn_hidden_size=256 model.ffn_hidden_size=256 model.vocab_size=512"
_SMALL = "model.hidden_size=128 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
_GLM = f"{_SMALL} model.moe_ffn_hidden_size=256 model.moe_shared_expert_intermediate_size=256"
_QWEN3_NEXT = f"{_GLM} model.linear_key_head_dim=16 model.linear_value_head_dim=16"
# Sinks, experts of one tensor a layer, gate and up row by row.
_GPT_OSS = "model.window_size=[7,0] model.hidden_size=64 model.moe_ffn_hidden_size=128 model.kv_channels=16"
# Model, overrides of all its runs -> the layouts that must start from the same bits as tp=1.
ROWS = {
    ("llama32_toy", SHARDED): ("tp=2", "dp=2"),
    ("qwen25_toy", ""): ("tp=4",),
    ("qwen3_toy", "model.share_embeddings_and_output_weights=false"): ("pp=2", "tp=2 pp=2"),
    ("qwen3_toy", "precision=fp32"): ("tp=2",),
    ("qwen3_toy", "precision=mxfp8"): ("tp=2",),
    ("qwen3_moe_toy", f"{_EXPERTS} {SHARDED} numerics.expert_groups=2"): ("ep=2 dp=2 tp=2", "tp=2 pp=2"),
    ("gpt_oss_toy", f"{_GPT_OSS} model.vocab_size=512"): ("tp=2 ep=2",),
    ("olmoe_toy", f"{_SMALL} model.moe_ffn_hidden_size=256"): ("tp=2 ep=2",),
    ("gemma3_toy", "model.interleaved_attn_pattern=[5,1]"): ("tp=2",),
    ("glm45_toy", f"{_GLM} model.mtp_num_layers=null"): ("tp=2 ep=2",),
    ("glm45_toy", f"{_GLM} model.num_layers=2 model.moe_layer_freq=[0,1]"): ("tp=2 pp=2",),
    ("qwen3_next_toy", f"{_QWEN3_NEXT} model.mtp_num_layers=null"): ("tp=2 ep=2",),
}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_it_goes_in_and_out(tpi, row):
    model, fixed = row
    sizes = [word for word in fixed.split() if word.startswith("model.")]
    for name, seed in (("hf", 0), ("other", 1)):
        made(tpi, name, model, *sizes, seed=seed, dtype="F32" if "precision=fp32" in fixed else "BF16")
    words = ("seq=64", "gbs=2", "iters=1", "save=1", *FROZEN, *fixed.split())
    train(tpi, "of-other", "other", *words, model=model)
    ledgers = []
    for number, layout in enumerate(("tp=1", *ROWS[row])):
        train(tpi, f"run-{number}", "hf", *words, *layout.split(), model=model)
        ledgers.append(tpi.ledger(f"run-{number}"))
        assert ledgers[-1] == ledgers[0], layout
        tpi("export", f"run-{number}", f"out-{number}", status=0)
        assert bits(tpi.folder / f"out-{number}") == bits(tpi.folder / "hf"), layout
    assert ledgers[0][0].loss != tpi.ledger("of-other")[0].loss
