# SPDX-License-Identifier: Apache-2.0
"""Two recipes: `base` trains all weights, and `adapted` trains LoRA adapters of them, on the examples beside this file.

    tpi train recipe=examples/finetuning/recipe.py:base tp=2 --dry-run         # check everything, also each example
    tpi train recipe=examples/finetuning/recipe.py:base tp=2 save=1 run.dir=base
    tpi verify recipe=examples/finetuning/recipe.py:adapted tp=1,2 checkpoint.pretrained_checkpoint=base/checkpoints

A line of examples/training.jsonl is one example. tokenizer/ is a Hugging Face tokenizer of bytes; take your model's.
"""

from pathlib import Path

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _peft_common, _sft_common

FOLDER = Path(__file__).parent


def model():
    return GPTModelProvider(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=16,
        vocab_size=512,
        seq_length=64,
        # numerics=tree covers these: RMSNorm, rotary positions, SwiGLU, no bias, no dropout.
        normalization="RMSNorm",
        position_embedding_type="rope",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def base():
    return on_examples(_sft_common())  # Bridge's defaults for fine-tuning


def adapted():
    cfg = on_examples(_peft_common())
    cfg.peft = LoRA(dim=8, alpha=16)
    return cfg


def on_examples(cfg):
    cfg.model = model()
    cfg.dataset.dataset_root = str(FOLDER / "examples")
    cfg.tokenizer.tokenizer_model = str(FOLDER / "tokenizer")
    cfg.dataset.seq_length, cfg.dataset.num_workers = 64, 0  # longer examples are cut
    cfg.dataset.enable_offline_packing, cfg.dataset.offline_packing_specs = False, None  # a row an example
    cfg.train.train_iters, cfg.train.global_batch_size = 10, 8
    cfg.optimizer.lr, cfg.scheduler.lr_warmup_iters = 1e-3, 0
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None  # else it reads examples/validation.jsonl
    return cfg
