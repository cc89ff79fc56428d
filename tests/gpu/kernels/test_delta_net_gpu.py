# SPDX-License-Identifier: Apache-2.0
"""The kernels of the gated delta rule on one GPU: a shard's bits are its own, and the rule's to rounding."""

import pytest
import torch

from tests.operands import same_bits
from tests.unit.kernels.test_delta_rule import both, errors, gradient_of, operands, token_by_token
from tp_invariant_recipes.kernels.delta_rule import CHUNK, Heads
from tp_invariant_recipes.numerics.layers.delta_net import gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("settings_of_a_run"), pytest.mark.timeout(300)]
SHARDS, TOKENS = 8, 3 * CHUNK + 37
NAMES = ("output", "x", "alpha", "beta", "A_log", "dt_bias")
ODD, LARGE = Heads(2, 4, 24, 40), Heads(2, 4, 128, 128)  # for each and its dtype Triton compiles the kernels


def test_it_is_the_rule():
    inputs = operands(TOKENS, ODD, SHARDS)
    exact = both(token_by_token, inputs, torch.float64, ODD)
    actual = both(gated_delta_rule, [item.cuda() for item in inputs], torch.float32, ODD)
    assert max(errors([value.cpu() for value in actual], exact)) < 1e-5


@pytest.mark.parametrize("sizes, dtype", ((ODD, torch.float32), (LARGE, torch.bfloat16)), ids=("odd", "large"))
def test_a_rank_with_a_part_of_the_shards_has_their_bits(sizes, dtype):
    inputs = [operand.cuda() for operand in operands(TOKENS, sizes, SHARDS)]
    whole = both(gated_delta_rule, inputs, dtype, sizes)
    for count in (1, 2, 4):
        shards = zip(*(item.split(count) for item in inputs), strict=True)
        parts = zip(*(both(gated_delta_rule, mine, dtype, sizes) for mine in shards), strict=True)
        assert [n for n, a, b in zip(NAMES, whole, map(torch.cat, parts), strict=True) if not same_bits(a, b)] == []


def test_a_graph_replays_them():
    inputs = [operand.cuda() for operand in operands(TOKENS, ODD, SHARDS)]

    def run():
        leaves = [item.detach().requires_grad_() for item in inputs]  # whose gradients are of this stream
        y = gated_delta_rule(*leaves, ODD)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    dy = gradient_of(gated_delta_rule(*inputs, ODD))
    expected = [item.clone() for item in run()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        completed = run()
    for result in completed:
        result.detach().zero_()
    graph.replay()
    assert [n for n, a, b in zip(NAMES, expected, completed, strict=True) if not same_bits(a, b)] == []
