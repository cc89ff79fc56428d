# SPDX-License-Identifier: Apache-2.0
"""Recipes for tpi: functions without arguments that return Megatron-Bridge's ConfigContainer.

    tpi train recipe=examples/recipe.py:small tp=2 --dry-run     # check everything, write nothing
    tpi verify recipe=examples/recipe.py:small tp=1,2            # do both layouts compute the same bits?

The command line overrides every field: iters=20 lr=1e-4 model.num_layers=4.
"""

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common


def small():
    cfg = _pretrain_common()  # Bridge's defaults for pretraining
    cfg.model = GPTModelProvider(
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
    # As the model's. Megatron generates the data, unless you add data=text data.path=FILE.
    cfg.dataset.seq_length = 64
    cfg.dataset.num_workers = 0
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 512
    cfg.train.train_iters, cfg.train.global_batch_size, cfg.train.micro_batch_size = 10, 2, 1
    cfg.optimizer.lr, cfg.scheduler.lr_warmup_iters = 1e-3, 0
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None  # no validation
    return cfg
