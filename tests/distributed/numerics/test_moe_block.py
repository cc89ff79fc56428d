"""Megatron-Core's mixture-of-experts layer on invariant parts: one result for every tp and ep; on its own, several."""

import re
import zlib

import pytest
import torch

from tests.distributed.ranks import joined, megatron, on_ranks, same_bits
from tp_invariant_recipes.numerics import spec

SHARDS = 4
SEQUENCE, BATCH, HIDDEN, EXPERTS = 32, 2, 64, 8
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # tp, ep
DTYPES = (torch.float32, torch.bfloat16)

# Qwen3's way and Nemotron-3's, without and with a limit to an expert's tokens.
QWEN = {
    "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
NEMOTRON = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": 2.5, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-2,
    "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
KINDS = {
    "qwen": QWEN,
    "nemotron": NEMOTRON,
    "nemotron capacity": NEMOTRON | {"moe_expert_capacity_factor": 0.75},
    "qwen padded": QWEN | PADDED,
    "qwen by position": QWEN | PADDED | {"moe_token_drop_policy": "position"},
}


def _config(size, ep, dtype, kind):
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    fields = {"activation_func": squared_relu} | KINDS[kind]
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=128, moe_ffn_hidden_size=32,
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_token_dispatcher_type="alltoall", add_bias_linear=False,
        bias_activation_fusion=False, hidden_dropout=0.0, bf16=dtype == torch.bfloat16, params_dtype=dtype,
        tensor_model_parallel_size=size, sequence_parallel=size > 1, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1, **fields,
    )  # fmt: skip
    config.invariant_mode, config.virtual_shards = "tree", SHARDS
    return config


def _layer(config, invariant):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend

    built = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=EXPERTS)
    layer = (spec.invariant(built) if invariant else built)(config=config, layer_number=1)
    layer.set_layer_number(1)
    return layer


def _named(layer, ep):
    """Parameters by a name that no layout changes."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    for name, parameter in layer.named_parameters():
        yield re.sub(r"local_experts\.(\d+)", lambda at: f"expert.{first + int(at[1])}", name), parameter


def _segments(name, config):
    return 2 if "linear_fc1" in name and config.gated_linear_unit else 1


def _split(name, parameter):
    return parameter.partition_dim if "shared" in name and parameter.tensor_model_parallel else None


def _set_weights(layer, mesh, ep):
    for name, parameter in _named(layer, ep):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        dim, shape = _split(name, parameter), list(parameter.shape)
        if dim is not None:
            shape[dim] *= mesh.size
        whole = torch.randn(shape, generator=generator) * 0.2
        segments = whole.chunk(_segments(name, layer.config), dim or 0)
        parts = [s.chunk(mesh.size, dim)[mesh.rank] if dim is not None else s for s in segments]
        parameter.data.copy_(torch.cat(parts, dim or 0))


def _micro_batch(n, dtype):
    generator = torch.Generator().manual_seed(n)
    return (torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(dtype) for _ in range(2))


def _run(mesh, ep, invariant, dtype, kind):
    """Output and input gradient of the second of two micro-batches; weight gradients of both; counts for the bias."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    config = _config(mesh.size, ep, dtype, kind)
    layer = _layer(config, invariant)
    _set_weights(layer, mesh, ep)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
    for n in range(2):
        x, dy = (value.chunk(mesh.size)[mesh.rank] for value in _micro_batch(n, dtype))
        x = x.clone().requires_grad_()
        y, _ = model(x)
        y.backward(dy)
    model.finish_grad_sync()
    _allreduce_non_tensor_model_parallel_grads([model], config)
    gradients = {
        name: (parameter.main_grad.clone(), _split(name, parameter), _segments(name, config))
        for name, parameter in _named(layer, ep)
    }
    counts = layer.router.local_tokens_per_expert
    return y.detach(), x.grad, gradients, None if counts is None else counts.clone()


# The stock layer where it is compared: with itself, and at tp=V with the invariant one.
STOCK = ((1, 1), (2, 1), (4, 4))


def _cases(tp, ep):
    return [
        (invariant, dtype, kind)
        for invariant in ((True, False) if (tp, ep) in STOCK else (True,))
        for dtype in DTYPES
        for kind in KINDS
    ]


def _every_case(mesh, ep):
    with megatron(mesh, expert_model_parallel_size=ep, expert_tensor_parallel_size=1):
        return {case: _run(mesh, ep, *case) for case in _cases(mesh.size, ep)}


def _whole(ranks):
    """What the ranks computed, put together: name -> tensor."""
    ys, dxs, gradients, counts = zip(*ranks, strict=True)
    whole = {"output": torch.cat(ys), "input gradient": torch.cat(dxs)}
    if counts[0] is not None:
        whole["counts"] = torch.stack(counts).sum(0)
    for name in sorted(set().union(*gradients)):
        held = [rank[name] for rank in gradients if name in rank]
        _, dim, segments = held[0]
        parts = [part for part, _, _ in held]
        if dim is None:
            assert all(same_bits(part, parts[0]) for part in parts), name
            whole[name] = parts[0]
        else:
            whole[name] = joined(parts, dim, segments)
    return whole


@pytest.fixture(scope="module")
def results(bridge):
    """(tp, ep, case) -> the whole tensors."""
    found = {}
    for tp, ep in LAYOUTS:
        ranks = on_ranks(tp, SHARDS, _every_case, ep)
        found |= {(tp, ep, case): _whole([rank[case] for rank in ranks]) for case in _cases(tp, ep)}
    return found


def _differing(one, other):
    assert one.keys() == other.keys()
    return {name for name in one if not same_bits(one[name], other[name])}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLayer:
    @pytest.mark.parametrize("tp, ep", LAYOUTS[1:])
    def test_one_result_for_all_layouts(self, results, dtype, kind, tp, ep):
        one, other = results[1, 1, (True, dtype, kind)], results[tp, ep, (True, dtype, kind)]
        assert len(one) >= 3 + 2 * EXPERTS
        assert all(gradient.any() for gradient in one.values())
        assert _differing(one, other) == set()

    def test_stock_has_several(self, results, dtype, kind):
        """Two ranks add what one adds in one piece: every gradient of a weight that sees both halves."""
        one, two = results[1, 1, (False, dtype, kind)], results[2, 1, (False, dtype, kind)]
        differing = _differing(one, two)
        assert {"router.weight", "experts.expert.0.linear_fc1.weight"} <= differing

    def test_both_compute_the_same_but_for_rounding(self, results, dtype, kind):
        """At tp=V, where stock's capacity is that of a virtual shard, too."""
        ours, stock = (results[4, 4, (invariant, dtype, kind)] for invariant in (True, False))
        for name in ours:
            error = (ours[name].double() - stock[name].double()).norm() / stock[name].double().norm()
            assert error < (1e-5 if dtype == torch.float32 else 3e-2), name


def _each_with_its_own_tokens():
    from tp_invariant_recipes.numerics import dispatch
    from tp_invariant_recipes.numerics.owners import Owners

    alone = classmethod(lambda cls, experts, tp, ep: cls(experts, 1, 1))
    dispatch.Owners = type("Alone", (Owners,), {"of": alone})


def _plain_router_gradient():
    from tp_invariant_recipes.numerics import router
    from tp_invariant_recipes.numerics.weight_gradient import weight_gradient

    def plain(weight, leaves, mesh, everywhere):
        local = leaves.sum((0, 1)).view(weight.shape)
        return weight_gradient(weight, lambda out, add: out.add_(local) if add else out.copy_(local))

    router.deliver = plain


def _capacity_of_a_rank():
    from tp_invariant_recipes.numerics import spec

    spec.SUBSTITUTES.pop("TopKRouter")
    spec.AS_THEY_ARE = (*spec.AS_THEY_ARE, "TopKRouter")


# An ingredient left out -> the kind that shows it, and what then depends on the layout; of a set, nothing else does.
INGREDIENTS = {
    "an expert's tokens on one rank": (_each_with_its_own_tokens, "qwen", "experts.expert.0.linear_fc1.weight"),
    "router weight gradient": (_plain_router_gradient, "qwen", {"router.weight"}),
    "capacity of a virtual shard": (_capacity_of_a_rank, "nemotron capacity", "output"),
}


def _without(mesh, ingredient):
    with megatron(mesh, expert_model_parallel_size=1, expert_tensor_parallel_size=1):
        plant, kind, _ = INGREDIENTS[ingredient]
        plant()
        return _run(mesh, 1, True, torch.float32, kind)


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_each_ingredient_is_needed(bridge, ingredient):
    one, two = (_whole(on_ranks(tp, SHARDS, _without, ingredient)) for tp in (1, 2))
    shown, differing = INGREDIENTS[ingredient][2], _differing(one, two)
    assert differing == shown if isinstance(shown, set) else shown in differing
