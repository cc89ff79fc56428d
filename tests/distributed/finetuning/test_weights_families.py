"""`weights=FOLDER` and `tpi export` of families with layers of their own, and of GLM-4.5: in, out, the same bits."""

import pytest

from tests.distributed.finetuning.test_weights import FROZEN, bits, made, train

pytestmark = [pytest.mark.usefixtures("modelopt"), pytest.mark.release]

_SMALL = "model.hidden_size=128 model.ffn_hidden_size=256 model.kv_channels=16 model.vocab_size=512"
_GLM = f"{_SMALL} model.moe_ffn_hidden_size=256 model.moe_shared_expert_intermediate_size=256"
_QWEN3_NEXT = f"{_GLM} model.linear_key_head_dim=16 model.linear_value_head_dim=16"
# Model, overrides of all its runs -> the layout that must start from the same bits as tp=1.
ROWS = {
    ("olmoe_toy", f"{_SMALL} model.moe_ffn_hidden_size=256"): "tp=2 ep=2",
    ("exaone4_toy", ""): "tp=2 pp=2",
    ("gemma2_toy", ""): "tp=2 pp=2",
    ("gemma3_toy", "model.interleaved_attn_pattern=[5,1]"): "tp=2",
    ("glm45_toy", f"{_GLM} model.mtp_num_layers=null"): "tp=2 ep=2",
    ("glm45_toy", f"{_GLM} model.num_layers=2 model.moe_layer_freq=[0,1]"): "tp=2 pp=2",
    ("qwen3_next_toy", f"{_QWEN3_NEXT} model.mtp_num_layers=null"): "tp=2 ep=2",
}


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_it_goes_in_and_out(tpi, row):
    model, fixed = row
    made(tpi, "hf", model, *fixed.split())
    made(tpi, "other", model, *fixed.split(), seed=1)
    words = ("iters=1", "save=1", *FROZEN, *fixed.split())
    train(tpi, "one", "hf", *words, "tp=1", model=model)
    train(tpi, "two", "hf", *words, *ROWS[row].split(), model=model)
    train(tpi, "of-other", "other", *words, model=model)
    assert tpi.ledger("one") == tpi.ledger("two")
    assert tpi.ledger("one")[0].loss != tpi.ledger("of-other")[0].loss
    tpi("export", "two", "out", status=0)
    assert bits(tpi.folder / "out") == bits(tpi.folder / "hf")
