"""Products of adapters of experts: against autograd, and the order of the owners' nodes."""

import pytest
import torch

from tp_invariant_recipes.kernels.products.grouped_product import Groups
from tp_invariant_recipes.numerics.layers.experts.expert_adapters import adapter_linear
from tp_invariant_recipes.numerics.layers.experts.expert_placement import Owners
from tp_invariant_recipes.numerics.layers.experts.token_dispatcher import Batches

SIZES = (3, 0, 5, 2, 1, 4)  # tokens of six experts


@pytest.mark.parametrize("shape", ((8, 4), (6, 8, 4)), ids=("shared", "each"))
def test_gradients_are_those_of_autograd(shape):
    batches = Batches(Groups(SIZES, torch.tensor(SIZES)), 0, 1)
    draw = torch.Generator().manual_seed(0)
    x, dy, weight = (torch.randn(size, generator=draw) for size in ((sum(SIZES), 4), (sum(SIZES), 8), shape))
    results, plain = ([item.clone().requires_grad_() for item in (x, weight)] for _ in range(2))
    y = adapter_linear(*results, batches, Owners(6, 1, 1))
    each = plain[1].unbind(0) if weight.dim() == 3 else [plain[1]] * 6
    wanted = torch.cat([rows @ w.t() for rows, w in zip(plain[0].split(SIZES), each, strict=True)])
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(y, wanted)
    for first, other in zip(results, plain, strict=True):
        torch.testing.assert_close(first.grad, other.grad)


@pytest.mark.parametrize("size, ep", ((4, 1), (4, 2), (4, 4)))
def test_nodes_are_in_the_order_of_experts(size, ep):
    owners = Owners(8, size, ep)
    by_owner = owners.by_owner(torch.arange(8)).view(size, -1)
    assert owners.in_order(by_owner).flatten().tolist() == [*range(8)]
