"""Initial weights of Megatron-Core's own model: no parameter is left out, and biases start at zero."""

import math

from torch import nn

from tests.distributed.ranks import on_ranks
from tests.unit.numerics.megatron.test_init_weights import ALL, HIDDEN, QKV, VOCAB, initialised
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

BIASES = (
    ({"add_bias_linear": True, "normalization": "LayerNorm"}, ALL),
    ({"add_bias_linear": False, "add_qkv_bias": True, "normalization": "RMSNorm"}, (QKV,)),
    ({"add_bias_linear": False, "normalization": "RMSNorm"}, ()),
)


def biases(mesh: VirtualMesh) -> list[dict[str, float]]:
    """For each of BIASES the largest value of every bias of linear layers; all parameters are NaN before."""
    from megatron.core import parallel_state

    from tp_invariant_recipes.cpu_host import cpu

    with cpu.installed():
        parallel_state.initialize_model_parallel()
        made = [initialised([gpt(**settings)]) for settings, _ in BIASES]
    assert not any(value.isnan().any() for values in made for value in values.values())
    return [
        {
            name.removeprefix("decoder.layers.0."): value.abs().max().item()
            for name, value in values.items()
            if name.endswith("bias") and "linear" in name
        }
        for values in made
    ]


def gpt(**settings) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        **settings,
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    made = GPTModel(config, spec, vocab_size=VOCAB, max_sequence_length=8, position_embedding_type="rope")
    for p in made.parameters():
        p.data.fill_(math.nan)
    return made


def test_biases_of_megatrons_layers_start_at_zero(bridge):
    assert on_ranks(1, 1, biases) == [[dict.fromkeys(names, 0.0) for _, names in BIASES]]
