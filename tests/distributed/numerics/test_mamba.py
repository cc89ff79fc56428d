"""Megatron-Core's Mamba layer with an invariant mixer: one result for every degree; with its own, several."""

import zlib
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.ranks import megatron, on_ranks, same_bits
from tp_invariant_recipes.errors import ConfigError
from tp_invariant_recipes.numerics.init import place

SHARDS = 4
SEQUENCE, BATCH, HIDDEN, HEADS, HEAD, GROUPS, STATE = 40, 2, 64, 8, 12, 4, 8
CHUNK = 16  # the sequence is two and a half of them
DTYPES = (torch.float32, torch.bfloat16)


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

    from tp_invariant_recipes.numerics import hybrid_spec, spec

    part = hybrid_spec.local_hybrid_spec(config).submodules.mamba_layer
    part.submodules.mixer.params = {"chunk_size": CHUNK}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(
        spec.invariant(part) if invariant else part, config=config, layer_number=1, pg_collection=groups
    )


def _split(parameter):
    """The dimension that is split over the ranks and the sizes of its local segments; None for what every rank has."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    dim = parameter.partition_dim
    return dim, list(getattr(parameter, "partition_sizes", [parameter.shape[dim]]))


def _set_weights(layer, mesh):
    """This rank's part of whole tensors that depend on nothing but their names."""
    for name, parameter in layer.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        split = _split(parameter)
        dim, sizes = split or (0, [parameter.shape[0]])
        shape, ranges = place(parameter.shape, dim, *((mesh.rank, mesh.size) if split else (0, 1)), sizes)
        part = torch.randn(shape, generator=generator) * (0.1 if parameter.ndim == 2 else 1.0)
        for at, pieces in enumerate(ranges):
            part = torch.cat([part.narrow(at, start, stop - start) for start, stop in pieces], at)
        parameter.data.copy_(part)


def _micro_batch(n, dtype):
    generator = torch.Generator().manual_seed(n)
    return (torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype) for _ in range(2))


def _run(mesh, invariant, dtype, sequence_parallel, main_grad):
    """Output, input gradient, and by name (weight gradient, how it is split)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    config = _config(mesh.size, dtype, sequence_parallel)
    layer = _layer(config, invariant)
    _set_weights(layer, mesh)
    if main_grad:
        model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
    else:
        model = layer
        model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    for n in range(2 if main_grad else 1):
        x, dy = (v.chunk(mesh.size)[mesh.rank] if sequence_parallel else v for v in _micro_batch(n, dtype))
        x = x.clone().requires_grad_()
        y = model(hidden_states=x)
        y.backward(dy)
    _allreduce_non_tensor_model_parallel_grads([model], config)
    gradients = {
        name: (p.main_grad.clone() if main_grad else p.grad, _split(p)) for name, p in layer.named_parameters()
    }
    return y.detach(), x.grad, gradients


def _cases(size):
    return [
        (invariant, dtype, sequence_parallel, main_grad)
        for invariant in (True, False)
        for dtype in DTYPES
        for sequence_parallel in ((False, True) if size > 1 else (False,))
        for main_grad in (False, True)
    ]


def _every_case(mesh):
    with megatron(mesh):
        return {case: _run(mesh, *case) for case in _cases(mesh.size)}


def _joined(parts, dim, sizes):
    split = [part.split(sizes, dim) for part in parts]
    return torch.cat([torch.cat(slices, dim) for slices in zip(*split, strict=True)], dim)


def _whole(ranks, sequence_parallel):
    """What the ranks computed, put together: name -> tensor."""
    ys, dxs, gradients = zip(*ranks, strict=True)
    whole = {}
    for name, parts in (("output", ys), ("input gradient", dxs)):
        assert sequence_parallel or all(same_bits(part, parts[0]) for part in parts)
        whole[name] = torch.cat(parts) if sequence_parallel else parts[0]
    for name, (first, split) in gradients[0].items():
        parts = [rank[name][0] for rank in gradients]
        assert split or all(same_bits(part, first) for part in parts), name
        whole[name] = _joined(parts, *split) if split else first
    return whole


@pytest.fixture(scope="module")
def results(bridge):
    """(degree, case) -> the whole tensors."""
    found = {}
    for size in (1, 2, 4):
        ranks = on_ranks(size, SHARDS, _every_case)
        found |= {(size, case): _whole([rank[case] for rank in ranks], case[2]) for case in _cases(size)}
    return found


OWN = {"A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias", "norm.weight"}
NAMES = {"output", "input gradient", "norm.weight", "mixer.in_proj.weight", "mixer.out_proj.weight"}
NAMES |= {f"mixer.{name}" for name in OWN}


@pytest.mark.parametrize("size, sequence_parallel", ((2, False), (2, True), (4, False), (4, True)))
@pytest.mark.parametrize("main_grad", (False, True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLayer:
    def test_one_result_for_all_degrees(self, results, dtype, main_grad, size, sequence_parallel):
        one = results[1, (True, dtype, False, main_grad)]
        other = results[size, (True, dtype, sequence_parallel, main_grad)]
        assert one.keys() == other.keys() == NAMES
        assert [name for name in NAMES if not same_bits(one[name], other[name])] == []

    def test_stock_layers_have_several(self, results, dtype, main_grad, size, sequence_parallel):
        one = results[1, (False, dtype, False, main_grad)]
        other = results[size, (False, dtype, sequence_parallel, main_grad)]
        crossing = ("output", "input gradient", "norm.weight")
        assert [name for name in crossing if same_bits(one[name], other[name])] == []

    def test_both_compute_the_same_but_for_rounding(self, results, dtype, main_grad, size, sequence_parallel):
        ours, stock = (results[size, (kind, dtype, sequence_parallel, main_grad)] for kind in (True, False))
        for name in NAMES:
            error = (ours[name].double() - stock[name].double()).norm() / stock[name].double().norm()
            # In bf16 both are about as far from fp32: the scan makes much of what in_proj rounds.
            assert error < (1e-5 if dtype == torch.float32 else 0.1), name


def _one_segment(mixer):
    mixer.in_proj.segments = 1


def _one_shard_a_rank(mixer):
    from tp_invariant_recipes.numerics.mesh import VirtualMesh

    group = mixer.pg_collection.tp
    mixer.__dict__["mesh"] = VirtualMesh(group.size(), group.size(), group.rank())


# An ingredient left out -> what then depends on the degree, at least.
INGREDIENTS = {
    "segments of in_proj": (_one_segment, {"input gradient", "norm.weight"}),
    "shards on their own": (_one_shard_a_rank, {"mixer.A_log", "mixer.dt_bias"}),
}


def _without(mesh, ingredient):
    from tp_invariant_recipes.numerics import mamba

    def built(self, *args, original=mamba.InvariantMambaMixer.__init__, **kwargs):
        original(self, *args, **kwargs)
        INGREDIENTS[ingredient][0](self)

    mamba.InvariantMambaMixer.__init__ = built
    with megatron(mesh):
        return _run(mesh, True, torch.float32, mesh.size > 1, True)


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    one, two = (_whole(on_ranks(t, SHARDS, _without, ingredient), t > 1) for t in (1, 2))
    assert {name for name in NAMES if not same_bits(one[name], two[name])} >= INGREDIENTS[ingredient][1]


def _refusal(mesh, settings, mode, shards):
    with megatron(mesh):
        config = _config(1, torch.float32, False, **settings)
        config.invariant_mode, config.virtual_shards = mode, shards
        with pytest.raises(ConfigError) as error:
            _layer(config, True)
        return str(error.value)


def test_what_it_does_not_cover_is_refused_at_once(bridge):
    (said,) = on_ranks(1, SHARDS, _refusal, {"use_mamba_mem_eff_path": False}, "gather", 8)
    for words in ("numerics=tree only", "numerics.shards=8 must divide model.mamba_num_groups=4", "mem_eff_path=true"):
        assert words in said
