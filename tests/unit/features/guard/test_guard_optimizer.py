"""The guard computes elements of an optimizer's step again."""

import random
from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.features.guard.optimizer import Adam
from tp_invariant_recipes.observe.optimizer_state import Slot


@pytest.mark.parametrize("stepped, fault, cases", ((True, 0.0, [None]), (True, 1.0, ["w"]), (False, 0.0, [])))
def test_a_step_is_judged_and_one_that_the_optimizer_skipped_is_not(stepped, fault, cases):
    """A skipped step has a gradient and changes nothing, as after an overflow of fp16."""
    weight = torch.nn.Parameter(torch.randn(128, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    (group,) = optimizer.param_groups
    slot = Slot(weight, weight, 0, False, optimizer, group)
    judged: list = []
    judge = SimpleNamespace(submit=lambda case: judged.append(case()))
    guard = Adam(SimpleNamespace(slots=[slot]), {weight: "w"}, judge, 0, portable=False)
    for number in range(2):  # the second step has moments
        guard.before(random.Random(0))
        weight.grad = torch.ones(128)
        if stepped or not number:
            optimizer.step()
        if number:
            weight.data += fault
            judged.clear()
        guard.after(number + 1)
    assert [wrong and wrong.where.split()[2] for wrong in judged] == cases
