# SPDX-License-Identifier: Apache-2.0
"""Which rank a shadow step names, by what was unlike: pairs of replicas made by hand."""

import random
from types import SimpleNamespace

import pytest
import torch

from tp_invariant_recipes.features.guard.memory import first_unlike
from tp_invariant_recipes.features.guard.optimizer import Adam
from tp_invariant_recipes.features.guard.shadow import ReplicaPair, first_of, narrowed, of_replicas
from tp_invariant_recipes.observe.optimizer_state import Slot

NORM, QKV = "forward pass of decoder.layers.0.input_layernorm", "forward pass of decoder.layers.0.linear_qkv"
OUTPUT = "backward pass at the input of output_layer"


def pairs(*unlike: tuple[int, int], replicas: int = 2, first: str = NORM, depth: int = 3) -> list[ReplicaPair]:
    """Of `of` replicas in a ring."""
    ring = [(n, (n - 1) % replicas) for n in range(replicas)]
    return [ReplicaPair(*pair, first if pair in unlike else None, depth if pair in unlike else 0) for pair in ring]


A, B = ("forward pass of a", (1, 2)), ("forward pass of b", (3, 4))


@pytest.mark.parametrize(
    "other, unlike",
    (
        ([A, B], None), ([A, (B[0], (3, 5))], (B[0], 1)), ([("forward pass of c", A[1]), B], (A[0], 0)),
        ([A], (B[0], 1)), ([A, B, A], ("an operation that only one has", 2)),
    ),
)  # fmt: skip
def test_the_first_operation_of_other_bits_another_name_or_one_replica_alone_is_named(other, unlike):
    assert first_unlike([A, B], other) == unlike


def test_replicas_that_agree_are_no_suspects():
    assert of_replicas(pairs(), (0, 1), 0) is None
    assert first_of([None, None]) is None


def test_of_two_replicas_either_may_be_wrong_and_of_three_the_one_in_two_pairs_is():
    two = of_replicas(pairs((0, 1), (1, 0)), (2, 6), 0)
    assert (two.ranks, two.judge, two.where) == ((2, 6), None, NORM)
    third = of_replicas(pairs((1, 0), (2, 1), replicas=3), (2, 6, 10), 0)
    assert (third.ranks, third.judge) == ((6,), "a third replica")


@pytest.mark.parametrize("unsteady, ranks, judge", (((1,), (6,), "itself"), ((), (2, 6), None), ((0, 1), (2, 6), None)))
def test_who_does_not_repeat_its_own_bits_is_wrong(unsteady, ranks, judge):
    own = [ReplicaPair(n, n, NORM if n in unsteady else None) for n in (0, 1)]
    result = narrowed(of_replicas(pairs((0, 1)), (2, 6), 0), own, (2, 6), "itself")
    assert (result.ranks, result.judge) == (ranks, judge)


def test_what_received_wrong_bits_from_another_rank_is_no_suspect():
    """Tensor-parallel ranks: the one that gathers sees the fault an operation later. Stages: a later one does."""
    faulty = narrowed(of_replicas(pairs((0, 1)), (1, 3), 0), [ReplicaPair(0, 0, NORM)], (1, 3), "itself")
    gathers = narrowed(of_replicas(pairs((0, 1), first=QKV, depth=4), (0, 2), 0), [ReplicaPair(0, 0, QKV)], (0, 2), "x")
    next_stage = of_replicas(pairs((0, 1), depth=0), (4, 6), 1)
    assert first_of([gathers, next_stage, None, faulty]).ranks == (1,)


def test_backward_passes_begin_at_the_last_stage():
    last, first = (
        of_replicas(pairs((0, 1), first=OUTPUT, depth=9), group, stage) for group, stage in (((4, 6), 1), ((0, 2), 0))
    )
    assert first_of([first, last]).ranks == (4, 6)


def test_ranks_that_are_unlike_at_one_operation_are_all_suspects():
    """Of a sum over tensor-parallel ranks nothing tells which summand is wrong."""
    both = [
        narrowed(of_replicas(pairs((0, 1)), group, 0), [ReplicaPair(0, 0, NORM)], group, "itself")
        for group in ((0, 2), (1, 3))
    ]
    result = first_of(both)
    assert (result.ranks, result.judge) == ((0, 1), None)


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
