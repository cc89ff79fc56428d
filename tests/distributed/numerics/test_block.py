"""Megatron-Core's transformer block on invariant layers: one result for every degree; on its own layers, several."""

import pytest
import torch

from tests.distributed.numerics.module_runs import (
    FP64,
    OnAllDegrees,
    OnDegrees,
    computed_in,
    differing_without,
    inaccurate,
    run,
    set_weights,
    split_of,
)
from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import spec

SHARDS = 4
SEQUENCE, BATCH, HIDDEN, HEADS = 64, 2, 128, 4


def _config(size, dtype, sequence_parallel):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=HEADS, ffn_hidden_size=256,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, qk_layernorm=True,
        normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0, bf16=dtype == torch.bfloat16,
        params_dtype=dtype, tensor_model_parallel_size=size, sequence_parallel=sequence_parallel,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    config.invariant_mode, config.virtual_shards = "tree", SHARDS
    return config


def _block(config, invariant):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=WrappedTorchNorm)
    return TransformerBlock(config, spec.invariant(parts) if invariant else parts)


def _run(mesh, kind, dtype, sequence_parallel, main_grad):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    block = _block(_config(mesh.size, computed_in(kind, dtype), sequence_parallel), kind is True)
    parameters = {
        name: (parameter, split_of(parameter, 2 if "linear_fc1" in name else 1))
        for name, parameter in block.named_parameters()
    }
    set_weights(parameters, mesh, 0.1, dtype)
    rotary = RotaryEmbedding(HIDDEN // HEADS, rotary_percent=1.0)(SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return run(
        block, parameters, mesh, (SEQUENCE, BATCH, HIDDEN),
        lambda model, x: model(hidden_states=x, attention_mask=mask, rotary_pos_emb=rotary),
        dtype=dtype, sequence_parallel=sequence_parallel, main_grad=main_grad,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(bridge):
    return OnDegrees(SHARDS, _run)


NAMES = {
    "output", "input gradient", "final_layernorm.weight",
    "layers.0.input_layernorm.weight", "layers.0.pre_mlp_layernorm.weight",
    "layers.0.self_attention.q_layernorm.weight", "layers.0.self_attention.k_layernorm.weight",
    "layers.0.self_attention.linear_qkv.weight", "layers.0.self_attention.linear_proj.weight",
    "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc2.weight",
}  # fmt: skip


class TestBlock(OnAllDegrees):
    names = crossing = frozenset(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_one_percent_too_much_is_seen(results, name):
    """The control of the bound on errors, where it is widest."""
    exact, stock, actual = (results[1, (kind, torch.bfloat16, False, True)] for kind in (FP64, False, True))
    assert inaccurate(actual | {name: actual[name].float() * 1.01}, stock, exact).keys() == {name}


def _plain_norm_gradients() -> None:
    from tp_invariant_recipes.numerics.layers import norm
    from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient

    def plain(weight, leaves, mesh, everywhere, by_heads):
        local = leaves.flatten(0, 1).sum(0).view(weight.shape)  # Megatron adds up what the ranks have
        return weight_gradient(weight, lambda out, add: out.add_(local) if add else out.copy_(local))

    norm.reduce_weight_gradient = plain


def _single_segment() -> None:
    from tp_invariant_recipes.numerics.megatron import base

    base.ColumnForward.segments = property(lambda layer: 1, lambda layer, value: None)


def _head_norms_like_others() -> None:
    from tp_invariant_recipes.numerics.megatron import spec

    spec.HEAD_NORMS = spec.SUBSTITUTES


# An ingredient left out -> what then depends on the degree; all else must not.
NORMS = {name for name in NAMES if "norm" in name}
HEAD_NORMS = {name for name in NORMS if "q_layernorm" in name or "k_layernorm" in name}
AFTER_FC1 = {"output", "final_layernorm.weight", "layers.0.mlp.linear_fc1.weight", "layers.0.mlp.linear_fc2.weight"}
INGREDIENTS = {
    "norm weight gradients": (_plain_norm_gradients, NORMS),
    "norms of queries and keys": (_head_norms_like_others, HEAD_NORMS),
    "segments of gate and up": (_single_segment, NAMES - AFTER_FC1),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    plant, shown = INGREDIENTS[ingredient]
    assert differing_without(plant, _run, SHARDS) == shown


def _embedded(mesh):
    """[b, s, h] for rows that hold -0.0, of a vocabulary divided among the ranks."""
    from tp_invariant_recipes.numerics.megatron.local import InvariantVocabParallelEmbedding

    with megatron(mesh):
        config = _config(mesh.size, torch.float32, sequence_parallel=False)
        embedding = InvariantVocabParallelEmbedding(16, 4, init_method=torch.nn.init.zeros_, config=config)
        embedding.weight.data.fill_(-0.0)
        return embedding(torch.arange(16).view(2, 8)).detach()


def test_the_embedding_of_negative_zero(bridge):
    single, four = on_ranks(1, SHARDS, _embedded), on_ranks(4, SHARDS, _embedded)
    assert all(same_bits(single[0], rank) for rank in four)
    assert not single[0].signbit().any()
