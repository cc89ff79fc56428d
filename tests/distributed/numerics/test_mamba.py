"""Megatron-Core's Mamba layer with an invariant mixer: one result for every degree; with its own, several."""

import pytest
import torch

from tests.distributed.numerics.module_runs import (
    OnAllDegrees,
    OnDegrees,
    computed_in,
    differing_without,
    run,
    set_weights,
    split_of,
)
from tests.distributed.ranks import megatron, on_ranks
from tp_invariant_recipes.errors import ConfigError

SHARDS = 4
SEQUENCE, BATCH, HIDDEN, HEADS, HEAD, GROUPS, STATE = 40, 2, 64, 8, 12, 4, 8
CHUNK = 16  # the sequence is two and a half of them


def _config(size, dtype, sequence_parallel, **settings):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, add_bias_linear=False, normalization="RMSNorm",
        mamba_num_heads=HEADS, mamba_head_dim=HEAD, mamba_num_groups=GROUPS, mamba_state_dim=STATE,
        is_hybrid_model=True, hidden_dropout=0.0, attention_dropout=0.0, bf16=dtype == torch.bfloat16,
        params_dtype=dtype, tensor_model_parallel_size=size, sequence_parallel=sequence_parallel,
        bias_dropout_fusion=False, persist_layer_norm=False, **settings,
    )  # fmt: skip
    config.invariant_mode, config.virtual_shards = "tree", SHARDS
    return config


def _layer(config, invariant):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from tp_invariant_recipes.numerics.megatron import spec

    part = spec.local_hybrid_spec(config).submodules.mamba_layer
    part.submodules.mixer.params = {"chunk_size": CHUNK}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(
        spec.invariant(part) if invariant else part, config=config, layer_number=1, pg_collection=groups
    )


def _run(mesh, kind, dtype, sequence_parallel, main_grad):
    layer = _layer(_config(mesh.size, computed_in(kind, dtype), sequence_parallel), kind is True)
    parameters = {name: (parameter, split_of(parameter)) for name, parameter in layer.named_parameters()}
    set_weights(parameters, mesh, 0.1, dtype)
    return run(
        layer, parameters, mesh, (SEQUENCE, BATCH, HIDDEN), lambda model, x: model(hidden_states=x),
        dtype=dtype, sequence_parallel=sequence_parallel, main_grad=main_grad,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(bridge):
    return OnDegrees(SHARDS, _run)


OWN = {"A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias", "norm.weight"}
NAMES = {"output", "input gradient", "norm.weight", "mixer.in_proj.weight", "mixer.out_proj.weight"}
NAMES |= {f"mixer.{name}" for name in OWN}


class TestLayer(OnAllDegrees):
    names = frozenset(NAMES)
    crossing = frozenset(("output", "input gradient", "norm.weight"))


def _single_segment(mixer):
    mixer.in_proj.segments = 1


def _shard_per_rank(mixer):
    from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

    group = mixer.pg_collection.tp
    mixer.__dict__["mesh"] = VirtualMesh(group.size(), group.size(), group.rank())


# An ingredient left out -> what then depends on the degree, at least.
INGREDIENTS = {
    "segments of in_proj": (_single_segment, {"input gradient", "norm.weight"}),
    "shards on their own": (_shard_per_rank, {"mixer.A_log", "mixer.dt_bias"}),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    leave_out, shown = INGREDIENTS[ingredient]

    def plant():
        from tp_invariant_recipes.numerics.megatron.families import mamba

        def built(self, *args, original=mamba.InvariantMambaMixer.__init__, **kwargs):
            original(self, *args, **kwargs)
            leave_out(self)

        mamba.InvariantMambaMixer.__init__ = built

    assert differing_without(plant, _run, SHARDS) >= shown


def _refusal(mesh, settings, mode, shards):
    with megatron(mesh):
        config = _config(1, torch.float32, False, **settings)
        config.invariant_mode, config.virtual_shards = mode, shards
        with pytest.raises(ConfigError) as error:
            _layer(config, True)
        return str(error.value)


def test_what_it_does_not_cover_is_refused_at_once(bridge):
    (message,) = on_ranks(1, SHARDS, _refusal, {"use_mamba_mem_eff_path": False}, "gather", 8)
    for words in (
        "numerics=tree only",
        "numerics.virtual_shards=8 must divide model.mamba_num_groups=4",
        "mem_eff_path=true",
    ):
        assert words in message
