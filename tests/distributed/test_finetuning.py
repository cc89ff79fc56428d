"""Fine-tuning on examples: a user's recipe of Bridge's defaults for it, with a loss mask, trained on the CPU."""

import json

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError

MINE = """
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _sft_common


def tuned():
    cfg = _sft_common()
    cfg.model = GPTModelProvider(
        num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=8, num_query_groups=8, kv_channels=16,
        vocab_size=64, seq_length=32, normalization="RMSNorm", activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        position_embedding_type="rope",
    )
    cfg.dataset.seq_length, cfg.dataset.num_workers = 32, 0
    cfg.dataset.enable_offline_packing, cfg.dataset.offline_packing_specs = False, None
    cfg.train.train_iters, cfg.train.global_batch_size = 12, 8
    cfg.optimizer.lr, cfg.scheduler.lr_warmup_iters = 3e-3, 0
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None
    return cfg


def packed():
    from megatron.bridge.data.packing import PackedSequenceSpecs

    cfg = tuned()
    cfg.dataset.enable_offline_packing = True
    cfg.dataset.offline_packing_specs = PackedSequenceSpecs(packed_sequence_size=32)
    return cfg


def adapted():
    from megatron.bridge.peft.lora import LoRA

    cfg = tuned()
    cfg.peft = LoRA()
    return cfg
"""
RECIPE = ("recipe=mine.py:tuned", "dataset.dataset_root=examples", "tokenizer.tokenizer_model=tokenizer")
EXAMPLES = 240


def example(number: int) -> str:
    """A sum of small numbers. Its prompt is of 3 to 11 words, so that examples have unequal numbers of tokens."""
    terms = [number % 7, number // 7 % 7, *([1] * (number % 5))]
    return json.dumps({"input": " + ".join(map(str, terms)) + " =", "output": str(sum(terms))})


@pytest.fixture(scope="module")
def mine(bridge, shared):
    """The folder of the runs, with a recipe, a tokenizer of 34 words and examples."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<unk>", "+", "=", *map(str, range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(shared.folder / "tokenizer")
    (shared.folder / "examples").mkdir()
    (shared.folder / "examples" / "training.jsonl").write_text("\n".join(map(example, range(EXAMPLES))) + "\n")
    (shared.folder / "mine.py").write_text(MINE)
    return shared.folder


@pytest.fixture(scope="module")
def tuned(mine, shared):
    """Runs of the same model and examples in two layouts."""
    return shared("verify", *RECIPE, "tp=1,2", "numerics.data_shards=2", "--dir", "tree")


def losses(shared, run):
    return [step.loss for step in shared.ledger(run)]


def test_tuning_has_one_result_in_every_layout(tuned):
    assert tuned.status == 0, tuned.stdout + tuned.stderr
    assert "identical: tp=1, 2 computed the same bits over 12 steps" in tuned.stdout


def test_tuning_lowers_the_loss(tuned, shared):
    found = losses(shared, "tree/tp1")
    assert found[-1] < found[0] / 2


def test_neither_ranks_nor_micro_batches_change_what_a_masked_token_counts(tuned, shared):
    """Each rank has other examples, of other numbers of tokens."""
    done = shared("train", *RECIPE, "dp=2", "mbs=2", "numerics.data_shards=2", "run.dir=dp2")
    assert done.status == 0, done.stderr
    compared = shared("compare", "tree/tp1", "dp2")
    assert compared.status == 0, compared.stdout


def test_with_stock_numerics_it_has_not(mine, shared):
    stock = ("numerics=stock", "numerics.initial_weights=invariant", "iters=2")
    done = shared("verify", *RECIPE, "tp=1,2", *stock, "--dir", "stock")
    assert done.status == 1, done.stdout + done.stderr
    assert "different: tp=2 computed other bits than tp=1 at step 1" in done.stdout
