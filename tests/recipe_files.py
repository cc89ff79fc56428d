"""The beginning of a user's file of recipes: a small model of Bridge's GPTModelProvider, of which recipes are made."""

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
