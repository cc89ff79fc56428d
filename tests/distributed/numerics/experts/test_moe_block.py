"""Megatron-Core's mixture-of-experts layer on invariant parts: one result for every tp and ep; on its own, several."""

import functools
import re

import pytest
import torch

from tests.distributed.numerics.module_runs import (
    DTYPES,
    FP64,
    computed_in,
    inaccurate,
    run,
    set_weights,
    split_of,
    whole,
)
from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import spec

SHARDS = 4
SEQUENCE, BATCH, HIDDEN, EXPERTS = 32, 2, 64, 8
# tp, ep. In `make test` an expert is on all ranks, on one, and in between; test_invariance_experts.py trains more.
SHORT = ((1, 1), (2, 1), (4, 4))
LAYOUTS = (*SHORT, (4, 2), (2, 2), (4, 1))

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
# Kinds that one set of ranks computes. In `make test` the first.
BATCHES = (("qwen", "nemotron capacity"), ("nemotron", "qwen padded", "qwen by position"))


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
    """Parameters by a name that no layout changes. Of experts, every rank that has one has it whole."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    for name, parameter in layer.named_parameters():
        segments = 2 if "linear_fc1" in name and layer.config.gated_linear_unit else 1
        split = split_of(parameter, segments) if "shared" in name else None
        yield re.sub(r"local_experts\.(\d+)", lambda at: f"expert.{first + int(at[1])}", name), (parameter, split)


def _run(mesh, ep, invariant, dtype, kind):
    """As `run` returns it, and counts for the bias."""
    layer = _layer(_config(mesh.size, ep, computed_in(invariant, dtype), kind), invariant is True)
    parameters = dict(_named(layer, ep))
    set_weights(parameters, mesh, 0.2, dtype)
    done = run(
        layer, parameters, mesh, (SEQUENCE, BATCH, HIDDEN), lambda model, x: model(x)[0],
        dtype=dtype, sequence_parallel=True, main_grad=True,
    )  # fmt: skip
    counts = layer.router.local_tokens_per_expert
    return done, None if counts is None else counts.clone()


# The stock layer where it is compared: with itself, and at tp=V with the invariant one.
STOCK = ((1, 1), (2, 1), (4, 4))


def _cases(tp, ep, kinds):
    return [
        (invariant, dtype, kind)
        for invariant in ((True, False, *([FP64] if (tp, ep) == (4, 4) else [])) if (tp, ep) in STOCK else (True,))
        for dtype in DTYPES
        for kind in kinds
    ]


def _every_case(mesh, ep, kinds):
    with megatron(mesh, expert_model_parallel_size=ep, expert_tensor_parallel_size=1):
        return {case: _run(mesh, ep, *case) for case in _cases(mesh.size, ep, kinds)}


def _whole(ranks):
    done, counts = zip(*ranks, strict=True)
    return whole(done, True) | ({} if counts[0] is None else {"counts": torch.stack(counts).sum(0)})


@pytest.fixture(scope="module")
def results(bridge):
    """tp, ep, of, dtype, kind -> the whole tensors, of a layout and kinds that a test asks for."""

    @functools.cache
    def computed(tp, ep, kinds):
        ranks = on_ranks(tp, SHARDS, _every_case, ep, kinds)
        return {case: _whole([rank[case] for rank in ranks]) for case in _cases(tp, ep, kinds)}

    def whole_tensors(tp, ep, *case):
        (kinds,) = (kinds for kinds in BATCHES if case[-1] in kinds)
        return computed(tp, ep, kinds)[case]

    return whole_tensors


def _differing(first, other):
    assert first.keys() == other.keys()
    return {name for name in first if not same_bits(first[name], other[name])}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.release] * (kind not in BATCHES[0])) for kind in KINDS]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLayer:
    @pytest.mark.parametrize(
        "tp, ep", [pytest.param(*at, marks=[pytest.mark.release] * (at not in SHORT)) for at in LAYOUTS[1:]]
    )
    def test_one_result_for_all_layouts(self, results, dtype, kind, tp, ep):
        first, other = (results(*at, True, dtype, kind) for at in ((1, 1), (tp, ep)))
        assert len(first) >= 3 + 2 * EXPERTS
        assert all(gradient.any() for gradient in first.values())
        assert _differing(first, other) == set()

    def test_stock_has_several(self, results, dtype, kind):
        """Two ranks add what one adds in one piece: every gradient of a weight that sees both halves."""
        first, second = (results(tp, 1, False, dtype, kind) for tp in (1, 2))
        differing = _differing(first, second)
        assert {"router.weight", "experts.expert.0.linear_fc1.weight"} <= differing

    def test_both_compute_the_same_but_for_rounding(self, results, dtype, kind):
        """At tp=V, where stock's capacity is that of a virtual shard, too."""
        actual, stock, exact = (results(4, 4, numerics, dtype, kind) for numerics in (True, False, FP64))
        assert exact.keys() == actual.keys()
        assert inaccurate(actual, stock, exact) == {}


def _each_with_its_own_tokens():
    from tp_invariant_recipes.numerics.layers.experts import token_dispatcher
    from tp_invariant_recipes.numerics.layers.experts.expert_placement import Owners

    alone = classmethod(lambda cls, config, tp, ep: cls(config.num_moe_experts, 1, 1))
    token_dispatcher.Owners = type("Alone", (Owners,), {"from_config": alone})


def _plain_router_gradient():
    from tp_invariant_recipes.numerics.megatron.moe import router
    from tp_invariant_recipes.numerics.sums.weight_gradient import weight_gradient

    def plain(weight, leaves, mesh, everywhere):
        local = leaves.sum((0, 1)).view(weight.shape)
        return weight_gradient(weight, lambda out, add: out.add_(local) if add else out.copy_(local))

    router.reduce_weight_gradient = plain


def _capacity_of_a_rank():
    from tp_invariant_recipes.numerics.megatron import spec

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
    first, second = (_whole(on_ranks(tp, SHARDS, _without, ingredient)) for tp in (1, 2))
    shown, differing = INGREDIENTS[ingredient][2], _differing(first, second)
    assert differing == shown if isinstance(shown, set) else shown in differing
