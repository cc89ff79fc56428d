# SPDX-License-Identifier: Apache-2.0
"""Places of tokens among logits; gradients of lookups; what stands for Megatron's compiled functions.

The compiled ones: tests/gpu/kernels/test_fused_gpu.py.
"""

from unittest.mock import Mock

import pytest
import torch

from tests.operands import same_bits
from tp_invariant_recipes.numerics.layers import embedding, linear
from tp_invariant_recipes.numerics.layers.cross_entropy import rank_of
from tp_invariant_recipes.numerics.megatron import data_parallel, local
from tp_invariant_recipes.numerics.sums.mesh import VirtualMesh


def test_the_largest_logit_has_place_1():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 2.0, 1.0]])
    for target, places in ((0, [4, 3]), (1, [1, 4]), (2, [3, 1])):
        assert rank_of(logits, torch.full((2,), target), VirtualMesh(4, 1, 0)).tolist() == places


def weight_with_main_grad():
    weight = torch.nn.Parameter(torch.randn(8, 4))
    weight.main_grad = torch.zeros(8, 4)
    return weight


@pytest.mark.parametrize("ahead", (True, False))
def test_each_lookup_tells_megatron_that_the_weight_has_a_gradient(ahead):
    """Also one of multi-token prediction alone, as on a last pipeline stage with an embedding of its own."""
    weight = weight_with_main_grad()
    embedding.lookup(weight, torch.tensor([[1, 3]]), None, ahead=ahead).sum().backward()
    assert weight.grad is not None
    assert weight.grad_added_to_main_grad
    rows = weight.main_grad + sum(embedding.sums_of_their_own(weight))[0] if ahead else weight.main_grad
    assert rows.sum(1).tolist() == [0, 4, 0, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("tied", (True, False))
def test_the_gradient_of_the_output_layer_does_not_wait_for_the_lookups_of_its_weight(tied):
    weight, order = weight_with_main_grad(), []
    weight.zero_out_wgrad = tied
    rows = embedding.lookup(weight, torch.tensor([[1, 3]]), None)
    accumulated = weight.expand_as(weight).grad_fn.next_functions[0][0]  # as Megatron finds it
    accumulated.register_hook(lambda *_: order.append("output layer"))
    rows.register_hook(lambda gradient: order.append("lookups"))
    linear.column_parallel(rows, weight, VirtualMesh(1, 1, 0), 1, False).sum().backward()
    assert order == (["output layer", "lookups"] if tied else ["lookups", "output layer"])
    assert weight.main_grad.any()
    assert len(embedding.sums_of_their_own(weight)) == tied


@pytest.mark.parametrize(
    "size, tied, buckets", ((100, True, [[2, 1], [0]]), (100, False, [[2, 1, 0]]), (None, True, [[2, 1, 0]]))
)
def test_a_tied_weight_has_a_bucket_of_its_own(size, tied, buckets):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    weights = [torch.nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]  # as a model has them: the embedding first
    weights[0].zero_out_wgrad = tied
    weights[1].data = weights[2].data = torch.zeros(2, 8)
    layout = data_parallel.tied_weights_alone(DistributedOptimizer.compute_full_param_layout)
    (made,) = layout(weights, size, 2, DistributedDataParallelConfig(use_distributed_optimizer=True)).layouts.values()
    of_bucket = {}
    for weight, (*_, bucket) in made.param_index_map.items():
        of_bucket.setdefault(bucket, []).append(next(n for n, other in enumerate(weights) if other is weight))
    assert [*of_bucket.values()] == buckets


def test_lookups_ahead_are_added_before_the_others():
    """The order is part of the modes' definition."""
    weight = weight_with_main_grad()
    for name in (embedding.LOOKUPS, embedding.AHEAD):
        setattr(weight, name, torch.full((1, 8, 4), float(name == embedding.AHEAD)))
    assert [kept.mean().item() for kept in embedding.sums_of_their_own(weight)] == [1.0, 0.0]


BF16, FP32 = torch.bfloat16, torch.float32
# What is not one addition.
OTHERS = {"bias": (BF16, True, 0.0), "dropout": (BF16, False, 0.1), "residual in fp32": (FP32, False, 0.0)}


def test_without_bias_and_dropout_it_is_one_addition():
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

    x, residual = torch.randn(5, 1, 64).to(BF16).requires_grad_(), torch.randn(5, 1, 64).to(BF16).requires_grad_()
    original = Mock()
    total = local.residual_add(original)((x, None), residual, 0.0)
    assert same_bits(total, bias_dropout_add_unfused(True)((x, None), residual, 0.0))
    gradient = torch.randn(5, 1, 64).to(BF16)
    assert all(same_bits(part, gradient) for part in torch.autograd.grad(total, (x, residual), gradient))
    original.assert_not_called()


@pytest.mark.parametrize("case", OTHERS)
def test_else_it_is_the_original(case):
    dtype, biased, prob = OTHERS[case]
    x, residual, original = torch.ones(4, dtype=BF16), torch.ones(4, dtype=dtype), Mock()
    with_bias = (x, x if biased else None)
    assert local.residual_add(original)(with_bias, residual, prob) is original.return_value
    original.assert_called_once_with(with_bias, residual, prob)


@pytest.mark.parametrize("replace, count", ((local.swiglu, 1), (local.swiglu_back, 2)))
def test_a_cpu_has_megatrons_swiglu(replace, count):
    original, operands = Mock(), [torch.ones(2, 4)] * count
    assert replace(original)(*operands) is original.return_value
    original.assert_called_once_with(*operands)


@pytest.mark.parametrize(
    "operands, taken",
    (
        ((Mock(is_cuda=True, dtype=BF16, **{"dim.return_value": 2}),), True),
        ((Mock(is_cuda=True, dtype=BF16, **{"dim.return_value": 3}),), False),
        ((Mock(is_cuda=True, dtype=BF16, **{"dim.return_value": 2, "is_contiguous.return_value": False}),), False),
        (tuple(Mock(is_cuda=True, dtype=dtype, **{"dim.return_value": 2}) for dtype in (BF16, FP32)), False),
    ),
    ids=("rows", "three dimensions", "gaps", "another dtype"),
)
def test_which_operands_the_kernel_takes(monkeypatch, operands, taken):
    assert local._taken(*operands) is taken
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not local._taken(*operands)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("heads, width, more", ((8, 16, {}), (1, 32, {}), (4, 16, {"rotary_interleaved": True})))
def test_rotary_positions_have_megatrons_bits(dtype, heads, width, more):
    """Also of zeros with signs; of heads of which a part is rotated, and interleaved, by Megatron's own function."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as original

    angles = 5.0 * torch.randn(6, 1, 1, 16)
    values, dy = torch.randn(6, 2, heads, 2 * width).to(dtype), torch.randn(6, 2, heads, width).to(dtype)
    for n, zero in enumerate((0.0, -0.0)):
        values[n], dy[2 + n] = zero, zero

    def passes(rotate, mscale):
        leaf = values.clone().requires_grad_()
        y = rotate(leaf[..., :width], angles, mscale=mscale, **more)
        y.backward(dy)
        return y.detach(), leaf.grad

    rotate = local.rotated(original)
    for mscale, by in ((1.0, 1.0), (1.0, 1.5), (1.25, 1.0)):  # each time with other cosines than those that are kept
        angles.mul_(by)
        assert all(map(same_bits, passes(rotate, mscale), passes(original, mscale)))
