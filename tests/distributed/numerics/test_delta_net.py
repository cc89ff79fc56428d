"""Megatron-Core's gated delta net with an invariant layer: one result for every degree; with its own, several."""

import functools
import inspect

import pytest
import torch

from tests.distributed.numerics.module_runs import DTYPES, differing_without, run, set_weights, split_of, whole
from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.kernels.delta_rule import CHUNK

SHARDS = 4
SEQUENCE, BATCH, HIDDEN = 40, 2, 64
CASES = [(kind, dtype, main_grad) for kind in (True, False) for dtype in DTYPES for main_grad in (False, True)]
NAMES = {"output", "input gradient", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight"}
NAMES |= {"in_proj.weight", "out_proj.weight"}


def _config(size, dtype, sequence_parallel, **settings):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, add_bias_linear=False, normalization="RMSNorm",
        experimental_attention_variant="gated_delta_net", linear_attention_freq=2, linear_key_head_dim=8,
        linear_value_head_dim=12, linear_num_key_heads=4, linear_num_value_heads=8, layernorm_zero_centered_gamma=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=dtype == torch.bfloat16, params_dtype=dtype,
        tensor_model_parallel_size=size, sequence_parallel=sequence_parallel, bias_dropout_fusion=False,
        persist_layer_norm=False, transformer_impl="local", **settings,
    )  # fmt: skip
    config.invariant_mode, config.virtual_shards = "tree", SHARDS
    return config


def _layer(config, invariant):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from tp_invariant_recipes.numerics.megatron import spec
    from tp_invariant_recipes.numerics.megatron.families import delta_net

    part = delta_net.block(config).layer_specs[0].submodules.self_attention
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(
        spec.invariant(part) if invariant else part, config=config, layer_number=1, pg_collection=groups
    )
    delta_net.mark_sections(layer)
    return layer


def _run(mesh, kind, dtype, sequence_parallel, main_grad):
    layer = _layer(_config(mesh.size, dtype, sequence_parallel), kind)
    parameters = {name: (parameter, split_of(parameter)) for name, parameter in layer.named_parameters()}
    set_weights(parameters, mesh, 0.1, dtype)
    return run(
        layer, parameters, mesh, (SEQUENCE, BATCH, HIDDEN), lambda model, x: model(x, None)[0],
        dtype=dtype, sequence_parallel=sequence_parallel, main_grad=main_grad,
    )  # fmt: skip


def _every(mesh):
    with megatron(mesh):
        return {case: _run(mesh, *case[:2], mesh.size > 1, case[2]) for case in CASES}


@pytest.fixture(scope="module")
def results(bridge):
    """Degree → case → the whole tensors, computed when asked for."""

    @functools.cache
    def results_of(size):
        ranks = on_ranks(size, SHARDS, _every)
        return {case: whole([rank[case] for rank in ranks], size > 1) for case in CASES}

    return results_of


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.release)))
@pytest.mark.parametrize("main_grad", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_for_all_degrees_and_stock_has_several(results, dtype, main_grad, size):
    first, other = (results(t)[True, dtype, main_grad] for t in (1, size))
    assert first.keys() == other.keys() == NAMES
    assert [name for name in NAMES if not same_bits(first[name], other[name])] == []
    first, other = (results(t)[False, dtype, main_grad] for t in (1, size))
    assert not same_bits(first["output"], other["output"])
    assert not same_bits(first["input gradient"], other["input gradient"])


@pytest.mark.parametrize("main_grad", (False, True))
def test_both_compute_the_same_but_for_rounding(results, main_grad):
    actual, stock = (results(1)[kind, torch.float32, main_grad] for kind in (True, False))
    assert {name for name in NAMES if (actual[name] - stock[name]).norm() > 1e-5 * stock[name].norm()} == set()


def test_chunks_are_those_of_megatron(bridge):
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule as stock

    assert inspect.signature(stock).parameters["chunk_size"].default == CHUNK


def _single_segment(net):
    net.in_proj.segments = 1


def _norm_of_rows(net):
    from tp_invariant_recipes.numerics.layers.norm import NormShards

    net.out_norm.shards_of = lambda: NormShards.SEQUENCE_WHOLE


# An ingredient left out -> what then depends on the degree, at least.
INGREDIENTS = {
    "segments of in_proj": (_single_segment, {"input gradient"}),
    "the norm's shards are heads": (_norm_of_rows, {"out_norm.weight"}),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    leave_out, shown = INGREDIENTS[ingredient]

    def plant():
        from tp_invariant_recipes.numerics.megatron.families import delta_net

        def built(self, *args, original=delta_net.InvariantGatedDeltaNet.__init__, **kwargs):
            original(self, *args, **kwargs)
            leave_out(self)

        delta_net.InvariantGatedDeltaNet.__init__ = built

    assert differing_without(plant, _run, SHARDS) >= shown


def _refusal(mesh):
    with megatron(mesh):
        config = _config(1, torch.float32, False, linear_conv_kernel_dim=3)
        config.invariant_mode, config.virtual_shards = "gather", 8
        with pytest.raises(ConfigError) as error:
            _layer(config, True)
        return str(error.value)


def test_what_it_does_not_cover_is_refused_at_once(bridge):
    (message,) = on_ranks(1, SHARDS, _refusal)
    for words in ("numerics=tree only", "virtual_shards=8 must divide model.linear_num_key_heads=4", "kernel_dim=4"):
        assert words in message
