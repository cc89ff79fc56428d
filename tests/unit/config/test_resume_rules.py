# SPDX-License-Identifier: Apache-2.0
"""In which layouts a run may go on: those in which it would have had the same bits, and whose state can be read."""

import pytest

from tp_invariant_recipes.config import fingerprint
from tp_invariant_recipes.config.fingerprint import BUCKETS, DISTRIBUTED, LAYER_WISE, OF_EVERY_RANK, StateForm
from tp_invariant_recipes.errors import lines
from tp_invariant_recipes.runs.checkpoints import OF_FSDP
from tp_invariant_recipes.settings.run_config import RunConfig

TREE = {"mode": "tree"}


def other_gradients(before, now) -> list[str]:
    return lines(fingerprint.other_gradients(before, now))


def unreadable_state(saved, before, wanted, now, separate=(False, False)) -> list[str]:
    states = (StateForm(*state) for state in zip((saved, wanted), (before, now), separate, strict=True))
    return lines(fingerprint.unreadable_state("checkpoint", *states))


def layout(**degrees: int) -> dict:
    return {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1, "etp": 1, "sp": False} | degrees


def run(numerics: dict, **degrees: int) -> dict:
    return {"numerics": numerics, "layout": layout(**degrees)}


@pytest.mark.parametrize(
    "before, now",
    (
        (run(TREE, dp=2), run(TREE, dp=2, tp=4, pp=2)),
        (run({"mode": "stock"}, dp=2), run({"mode": "stock"}, dp=1)),
        (run(TREE, dp=2), run({"mode": "stock"}, dp=1)),
        (run(TREE | {"data_shards": 4}, dp=4), run(TREE | {"data_shards": 4}, dp=1)),
        (run(TREE, dp=4), run(TREE | {"data_shards": 4}, dp=2)),
    ),
)
def test_the_gradient_tree_is_the_same(before, now):
    assert other_gradients(before, now) == []


@pytest.mark.parametrize(
    "before, now, dp",
    (
        (run(TREE, dp=2), run(TREE, dp=1), 2),
        (run({"mode": "gather"}, dp=1), run({"mode": "gather"}, dp=2), 1),
        (run(TREE | {"data_shards": 4}, dp=2), run(TREE, dp=2), 4),
    ),
)
def test_another_gradient_tree_is_refused(before, now, dp):
    (problem,) = other_gradients(before, now)
    assert problem.startswith(f"dp={now['layout']['dp']}: ")
    assert problem.endswith(f"would not be bitwise identical; dp={dp}, or numerics=stock")


@pytest.mark.parametrize(
    "optimizer, checkpoint, form",
    (
        ({}, {}, OF_EVERY_RANK),
        ({"use_distributed_optimizer": False}, {"dist_ckpt_optim_fully_reshardable": True}, OF_EVERY_RANK),
        ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, {}, OF_EVERY_RANK),
        ({"use_distributed_optimizer": True}, {}, BUCKETS),
        ({"use_distributed_optimizer": True}, {"dist_ckpt_optim_fully_reshardable": True}, DISTRIBUTED),
    ),
)
def test_the_form_of_an_optimizers_state(optimizer, checkpoint, form):
    assert fingerprint.optimizer_state(RunConfig({"optimizer": optimizer, "checkpoint": checkpoint})) == form


@pytest.mark.parametrize(
    "optimizer", ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, {"optimizer": "dist_muon"})
)
def test_the_form_of_a_layer_wise_state_of_experts(optimizer):
    config = RunConfig({"optimizer": optimizer, "checkpoint": {}, "model": {"num_moe_experts": 8}})
    assert fingerprint.optimizer_state(config) == LAYER_WISE


EVERYTHING = layout(tp=2, pp=2, dp=4, ep=2)
READABLE = (
    (OF_EVERY_RANK, layout(), OF_EVERY_RANK, EVERYTHING), (LAYER_WISE, layout(), LAYER_WISE, EVERYTHING),
    (DISTRIBUTED, layout(), DISTRIBUTED, EVERYTHING), (DISTRIBUTED, layout(), BUCKETS, EVERYTHING),
    (BUCKETS, layout(tp=2, dp=2), DISTRIBUTED, layout(tp=2, dp=1)),
)  # fmt: skip


@pytest.mark.parametrize("saved, before, wanted, now", READABLE)
def test_a_state_that_can_be_read(saved, before, wanted, now):
    assert unreadable_state(saved, before, wanted, now) == []


UNREADABLE = (
    (OF_EVERY_RANK, layout(), DISTRIBUTED, layout(), (False, False), "optimizer.use_distributed_optimizer=false"),
    (BUCKETS, layout(), OF_EVERY_RANK, layout(), (False, False), "optimizer.use_distributed_optimizer=true"),
    (OF_FSDP, layout(), DISTRIBUTED, layout(), (False, False), "ddp.use_megatron_fsdp=true"),
    (DISTRIBUTED, layout(), OF_FSDP, layout(), (False, False), "ddp.use_megatron_fsdp=false"),
    (LAYER_WISE, layout(), OF_EVERY_RANK, layout(), (False, False), "layer_wise_distributed_optimizer=true"),
    (OF_EVERY_RANK, layout(), LAYER_WISE, layout(), (False, False), "layer_wise_distributed_optimizer=false"),
    (LAYER_WISE, layout(), DISTRIBUTED, layout(), (False, False), "optimizer.use_distributed_optimizer=false"),
    (BUCKETS, layout(tp=2), DISTRIBUTED, layout(pp=2), (False, False), "tp was 2, pp was 1; keep tp=2 pp=1"),
    (DISTRIBUTED, layout(tp=2), DISTRIBUTED, layout(), (True, False), "continue with tp > 1 or ep > 1"),
    (OF_EVERY_RANK, layout(), OF_EVERY_RANK, layout(ep=2, dp=2), (False, True), "with numerics=stock alone"),
)


@pytest.mark.parametrize("saved, before, wanted, now, separate, says", UNREADABLE)
def test_a_state_that_cannot_be_read_is_refused(saved, before, wanted, now, separate, says):
    (problem,) = unreadable_state(saved, before, wanted, now, separate=separate)
    assert problem.startswith("checkpoint: it holds ")
    assert says in problem


@pytest.mark.parametrize("degree", ("tp", "pp", "cp", "ep", "etp"))
def test_every_degree_but_dp_decides_what_lies_in_a_buffer(degree):
    (problem,) = unreadable_state(BUCKETS, layout(**{degree: 2}), DISTRIBUTED, layout(dp=2))
    assert f"{degree} was 2; keep {degree}=2;" in problem


MOE = {"num_moe_experts": 8}
SEPARATE = (
    ("tree", MOE, layout(), True), ("portable", MOE, layout(ep=2, dp=2), True), ("stock", MOE, layout(), False),
    ("stock", MOE, layout(tp=2), True), ("stock", MOE, layout(ep=2, dp=2), True),
    ("tree", {"num_moe_experts": None}, layout(tp=2), False),
)  # fmt: skip


@pytest.mark.parametrize("mode, model, at, separate", SEPARATE)
def test_whether_experts_have_an_optimizer_of_their_own(mode, model, at, separate):
    assert fingerprint.experts_separate(mode, model, at) is separate


@pytest.mark.parametrize(
    "before, now, same",
    (
        ({"dp": 4}, {"dp": 2, "cp": 2}, True), ({"dp": 4, "ep": 2}, {"dp": 2, "cp": 2, "ep": 4}, True),
        ({"dp": 4, "ep": 2}, {"dp": 2, "ep": 2}, False), ({"dp": 2, "ep": 2}, {"dp": 2}, False),
        ({"tp": 2}, {"pp": 2}, False),
    ),
)  # fmt: skip
def test_random_states_are_those_of_ranks(before, now, same):
    for first, other in ((before, now), (now, before)):
        assert fingerprint.same_random_states(layout(**first), layout(**other)) is same
