"""Megatron-Core's local core attention on a backend whose results depend on the number of heads it is given."""

from itertools import pairwise, product

import pytest
import torch

from tests.distributed.ranks import megatron, on_ranks
from tests.operands import same_bits
from tp_invariant_recipes.numerics.megatron import spec
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh

SHARDS, SEQUENCE, BATCH = 4, 64, 2
HEADS, GROUPS, WIDTH = 8, 4, 16
DEGREES = (1, 2, 4)
DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("output", "query", "key", "value")


def _lying(original):
    """A sum of two parts with roundings of its own, unless the heads are those of one shard."""

    def forward(self, query, key, value, *mask):
        if query.shape[2] == HEADS // SHARDS:
            return original(self, query, key, value, *mask)
        return sum(original(self, query, key, value * part, *mask) for part in (0.7, 0.3))

    return forward


def _run(mesh):
    """Output and gradients of this rank's heads: (dtype, kind of layer) → name → tensor."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    with megatron(mesh):
        DotProductAttention.forward = _lying(DotProductAttention.forward)
        results = {}
        for dtype, kind in product(DTYPES, ("invariant", "stock")):
            config = TransformerConfig(
                num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
                attention_dropout=0.0, masked_softmax_fusion=False, tensor_model_parallel_size=mesh.size,
                bf16=dtype == torch.bfloat16, params_dtype=dtype,
            )  # fmt: skip
            config.virtual_shards = SHARDS
            layer = spec.invariant(DotProductAttention) if kind == "invariant" else DotProductAttention
            module = layer(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
            results[dtype, kind] = _trained(module, mesh, dtype)
        return results


def _trained(module, mesh, dtype):
    generator = torch.Generator().manual_seed(0)
    *inputs, gradient = (
        torch.randn(SEQUENCE, BATCH, heads, WIDTH, generator=generator).to(dtype).chunk(mesh.size, 2)[mesh.rank]
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = module(*leaves, torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1))
    out.backward(gradient.reshape(out.shape))
    return dict(zip(NAMES, (out.detach().unflatten(2, (-1, WIDTH)), *(x.grad for x in leaves)), strict=True))


@pytest.fixture(scope="module")
def results(bridge):
    """(dtype, kind of layer) → for each degree, name → the whole tensor."""
    ranks = {degree: on_ranks(degree, SHARDS, _run) for degree in DEGREES}
    return {
        case: [{name: torch.cat([rank[case][name] for rank in ranks[d]], 2) for name in NAMES} for d in DEGREES]
        for case in product(DTYPES, ("invariant", "stock"))
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_result_for_all_degrees(results, dtype):
    for first, other in pairwise(results[dtype, "invariant"]):
        assert [name for name in NAMES if not same_bits(first[name], other[name])] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_attention_has_several(results, dtype):
    single, _, four = results[dtype, "stock"]
    assert [name for name in NAMES if same_bits(single[name], four[name])] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_is_attention_of_a_shard(results, dtype):
    """At tp=4 a rank has one shard, and stock attention computes it alone."""
    actual, stock = results[dtype, "invariant"][0], results[dtype, "stock"][2]
    assert [name for name in NAMES if not same_bits(actual[name], stock[name])] == []


def test_a_key_that_heads_share_adds_their_gradients_in_order(bridge):
    """Those of a shard, first to last: multi-latent attention."""
    from tp_invariant_recipes.numerics.megatron.attention.latent_attention import _Spread

    key, big = torch.zeros(1, 1, 1, 1, requires_grad=True), 2.0**24  # the number after it is big + 2
    for gradients, total in (([big, 1, -big], 0.0), ([big, -big, 1], 1.0)):
        spread = _Spread.apply(key, 3, VirtualMesh(1, 1, 0))
        (gradient,) = torch.autograd.grad(spread, key, torch.tensor(gradients).view(1, 1, 3, 1))
        assert gradient.item() == total
