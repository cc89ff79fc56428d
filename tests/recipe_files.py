# SPDX-License-Identifier: Apache-2.0
"""The beginning of a user's file of recipes: a small model of Bridge's GPTModelProvider, of which recipes are made.

TUNED goes on with what fine-tuning needs: `small` cuts a recipe of Bridge's defaults, for the examples of
tests/examples.py.
"""

MODEL = """
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider


def model(vocab_size, seq_length):
    return GPTModelProvider(
        num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=8, num_query_groups=8, kv_channels=16,
        vocab_size=vocab_size, seq_length=seq_length, normalization="RMSNorm",
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, position_embedding_type="rope",
    )

"""

TUNED = (
    MODEL
    + """
from megatron.bridge.recipes.common import _peft_common, _sft_common


def small(cfg):
    cfg.model = model(vocab_size=64, seq_length=32)
    cfg.dataset.seq_length, cfg.dataset.num_workers = 32, 0
    cfg.dataset.enable_offline_packing, cfg.dataset.offline_packing_specs = False, None
    cfg.train.train_iters, cfg.train.global_batch_size = 12, 8
    cfg.optimizer.lr, cfg.scheduler.lr_warmup_iters = 3e-3, 0
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, None
    return cfg
"""
)
