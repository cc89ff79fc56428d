"""Which gradient norms differ by more than rounding: the rule, and whose parameters they are."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.compare import norm_ratios
from tp_invariant_recipes.compare.norm_ratios import MARGIN, Norms, deviation, judge_ratios, same
from tp_invariant_recipes.compare.parameter_groups import GROUPS, groups_in_order, parameter_group
from tp_invariant_recipes.errors import RunError
from tp_invariant_recipes.workflows import audit
from tp_invariant_recipes.workflows.audit import Pair

FC1 = "decoder.layers.{}.mlp.experts.{}.linear_fc1.weight"
NAMES = [FC1.format(layer, expert) for layer in (1, 4) for expert in (0, 1)]
ROUTER, EMBEDDING = "decoder.layers.1.mlp.router.weight", "embedding.word_embeddings.weight"
ALL = (*NAMES, ROUTER, EMBEDDING)


def norms_of_training(steps: int = 4, **factors: float) -> list[Norms]:
    """Norms of some steps, 1 × the parameter's number × the step's; a factor is of a name at one step: name@step."""
    own = {
        (name, step): (1 + n) * step * factors.get(f"{name}@{step}", 1.0)
        for n, name in enumerate(ALL)
        for step in range(1, steps + 1)
    }
    return [Norms(step, 0, {name: own[name, step] for name in ALL}) for step in range(1, steps + 1)]


# Rounding moves every parameter by a thousandth at each step that counts.
ROUNDED = norms_of_training(**{f"{name}@{step}": 1.001 for name in ALL for step in (3, 4)})


def states_by_group(second: list[Norms], rounded: list[Norms] | None = ROUNDED) -> dict[str, str]:
    judged = judge_ratios(norms_of_training(), second, rounded, counts_from=3)
    return {group.name: group.state for group in judged.groups}


def test_the_same_numbers_are_equal_and_need_no_third_training():
    assert same(norms_of_training(), norms_of_training())
    assert states_by_group(norms_of_training(), None) == {"experts": "equal", "router": "equal", "embedding": "equal"}
    assert states_by_group(norms_of_training())["experts"] == "equal"


@pytest.mark.parametrize("factor", (0.44, 2.0, 1.0041, 0.9959))
@pytest.mark.parametrize("step", (3, 4))
def test_one_expert_at_one_step_beyond_rounding_is_found(factor, step):
    name = NAMES[2]
    judged = judge_ratios(norms_of_training(), norms_of_training(**{f"{name}@{step}": factor}), ROUNDED, counts_from=3)
    (group,) = judged.different
    assert (group.name, group.parameters) == ("experts", 4)
    assert (group.worst.name, group.worst.step, group.since) == (name, step, step)
    assert group.worst.ratio == pytest.approx(factor)
    assert group.worst.allowed == pytest.approx(MARGIN * math.log(1.001))
    assert {group.low, group.high} == {1.0, group.worst.ratio}


@pytest.mark.parametrize("factor", (1.0039, 0.9962))
def test_what_rounding_can_do_is_no_difference(factor):
    second = norms_of_training(**{f"{ROUTER}@4": factor})
    assert not same(norms_of_training(), second)
    assert states_by_group(second) == {"experts": "equal", "router": "rounding", "embedding": "equal"}


def test_a_group_may_move_as_far_as_rounding_moves_it_and_no_further():
    loose = norms_of_training(**{f"{ROUTER}@3": 1.1} | {f"{name}@3": 1.001 for name in (*NAMES, EMBEDDING)})
    assert states_by_group(norms_of_training(**{f"{ROUTER}@4": 1.4}), loose)["router"] == "rounding"
    assert states_by_group(norms_of_training(**{f"{NAMES[0]}@4": 1.4}), loose)["experts"] == "different"


def test_what_rounding_does_later_excuses_nothing_before():
    apart = norms_of_training(**{f"{name}@3": 1.001 for name in ALL} | {f"{name}@4": 1.2 for name in ALL})
    both = norms_of_training(**{f"{ROUTER}@3": 1.1, f"{ROUTER}@4": 1.3, f"{EMBEDDING}@4": 1.3})
    judged = judge_ratios(norms_of_training(), both, apart, counts_from=3)
    (router,) = judged.different
    assert (router.name, router.since, router.worst.step) == ("router", 3, 3)  # further at 4, but less beyond rounding
    assert states_by_group(both, apart)["embedding"] == "rounding"


def test_each_group_has_the_step_from_which_on_it_differs():
    second = norms_of_training(**{f"{NAMES[0]}@3": 0.4, f"{NAMES[0]}@4": 0.4, f"{ROUTER}@4": 1.1})
    since = {
        group.name: group.since for group in judge_ratios(norms_of_training(), second, ROUNDED, counts_from=3).groups
    }
    assert since == {"experts": 3, "router": 4, "embedding": None}


def test_a_single_parameter_that_rounding_left_alone_by_chance_may_move_as_the_others():
    lucky = norms_of_training(**{f"{name}@3": 1.001 for name in (*NAMES, EMBEDDING)})
    assert states_by_group(norms_of_training(**{f"{ROUTER}@4": 1.002}), lucky)["router"] == "rounding"


def test_steps_before_those_that_count_are_no_difference_but_show_what_does_not_repeat():
    second = norms_of_training(**{f"{EMBEDDING}@1": 1.2, f"{EMBEDDING}@4": 1.3})
    judged = judge_ratios(norms_of_training(), second, ROUNDED, counts_from=3)
    assert not judged.repeats
    assert judged.different == ()
    assert judge_ratios(norms_of_training(), norms_of_training(), ROUNDED, counts_from=3).repeats
    assert states_by_group(norms_of_training(**{f"{EMBEDDING}@4": 1.3}))["embedding"] == "different"


def test_a_gradient_that_is_gone_or_no_number_differs_whatever_rounding_does():
    for factor in (0.0, math.nan, math.inf):
        judged = judge_ratios(norms_of_training(), norms_of_training(**{f"{ROUTER}@3": factor}), ROUNDED, counts_from=3)
        (group,) = judged.different
        assert (group.name, group.worst.ratio, group.worst.deviation) == ("router", None, math.inf)
        assert group.low is None


def test_gradients_that_are_0_in_both_are_equal():
    gone = norms_of_training(**{f"{name}@{step}": 0.0 for name in NAMES for step in (1, 2, 3, 4)})
    rounded = norms_of_training(**{f"{n}@{s}": 0.0 if n in NAMES else 1.01 for n in ALL for s in (3, 4)})
    rounded = [*gone[:2], *rounded[2:]]
    judged = judge_ratios(gone, gone, rounded, counts_from=3)
    experts = judged.groups[0]
    assert (experts.name, experts.state, experts.first) == ("experts", "equal", 0.0)


def idle(*steps: int, value: float = 0.0) -> list[Norms]:
    """The rounded training with an expert, of layer 4, that gets no token at these steps."""
    return norms_of_training(
        **{f"{n}@{s}": value if n == IDLE and s in steps else 1.001 for n in ALL for s in (3, 4)},
        **{f"{IDLE}@{s}": value for s in steps if s < 3},
    )


IDLE = NAMES[2]


@pytest.mark.parametrize("value", (0.0, math.nan, math.inf))
def test_an_expert_without_tokens_by_rounding_is_set_aside_and_the_rest_is_judged(value):
    second = norms_of_training(**{f"{name}@{step}": 0.4 for name in NAMES for step in (3, 4)})
    judged = judge_ratios(norms_of_training(), second, idle(3, 4, value=value), counts_from=3)
    (aside,) = judged.aside
    assert (aside.name, aside.group, aside.since, aside.first) == (IDLE, "experts", 3, 9.0)
    (group,) = judged.different
    assert (group.name, group.parameters, group.since) == ("experts", 3, 3)
    assert group.worst.allowed == pytest.approx(MARGIN * math.log(1.001))
    assert [ratio.name for ratio in judged.ratios] == [name for name in ALL if name != IDLE]
    assert states_by_group(norms_of_training(**{f"{IDLE}@4": 0.4}), idle(3, 4, value=value))["experts"] == "equal"


def test_a_parameter_is_judged_at_the_steps_before_it_is_set_aside():
    judged = judge_ratios(norms_of_training(), norms_of_training(**{f"{IDLE}@3": 0.4}), idle(4), counts_from=3)
    assert (judged.aside[0].since, judged.different[0].worst.name, judged.different[0].since) == (4, IDLE, 3)
    assert states_by_group(norms_of_training(**{f"{IDLE}@4": 0.4}), idle(4))["experts"] == "equal"
    assert states_by_group(norms_of_training(**{f"{IDLE}@4": 0.4}), ROUNDED)["experts"] == "different"


def test_an_expert_without_tokens_in_the_first_training_alone_is_set_aside_too():
    first = norms_of_training(**{f"{IDLE}@3": 0.0})
    judged = judge_ratios(first, norms_of_training(**{f"{ROUTER}@4": 1.3}), ROUNDED, counts_from=3)
    assert [(one.name, one.first) for one in judged.aside] == [(IDLE, 0.0)]
    assert [group.name for group in judged.different] == ["router"]


def test_steps_that_do_not_repeat_set_a_parameter_aside_for_good():
    judged = judge_ratios(
        norms_of_training(), norms_of_training(**{f"{IDLE}@1": 0.0, f"{IDLE}@3": 0.4}), ROUNDED, counts_from=3
    )
    assert [(one.name, one.since) for one in judged.aside] == [(IDLE, 3)]
    assert (judged.different, judged.repeats) == ((), False)


def test_a_group_that_is_set_aside_whole_has_no_row():
    rounded = norms_of_training(**{f"{n}@{s}": 0.0 if n in NAMES else 1.001 for n in ALL for s in (3, 4)})
    assert states_by_group(norms_of_training(**{f"{NAMES[0]}@3": 0.4}), rounded) == {
        "router": "equal",
        "embedding": "equal",
    }
    assert states_by_group(norms_of_training(**{f"{ROUTER}@3": 0.4}), rounded)["router"] == "different"


def test_the_result_names_what_was_set_aside():
    planned = SimpleNamespace(
        pair=Pair("eager", "replayed", (), (), replays=True), counts_from=3, first=SimpleNamespace(steps=4)
    )
    judged = judge_ratios(norms_of_training(), norms_of_training(**{f"{ROUTER}@4": 1.001}), idle(4), counts_from=3)
    assert audit._text(planned, judged).endswith("over steps 3 to 4; set aside: 1 of 6 parameters")
    (remark,) = audit._remarks(planned, judged)
    assert remark.startswith(
        f"not judged from step 4 on: {IDLE}: rounding alone takes the norm of its gradient from 12 "
    )
    none = judge_ratios(norms_of_training(), norms_of_training(**{f"{ROUTER}@4": 1.001}), ROUNDED, counts_from=3)
    assert audit._text(planned, none).endswith("over steps 3 to 4")
    assert audit._remarks(planned, none) == []


def test_what_cannot_be_judged_is_an_error():
    with pytest.raises(RunError, match="changed no gradient"):
        judge_ratios(norms_of_training(), norms_of_training(**{f"{ROUTER}@3": 2.0}), norms_of_training(), counts_from=3)
    gone = norms_of_training(**{f"{name}@3": 0.0 for name in ALL})
    with pytest.raises(RunError, match=r"takes the gradient of every parameter, such as .* nothing can be judged"):
        judge_ratios(norms_of_training(), norms_of_training(), gone, counts_from=3)
    fewer = [Norms(one.step, 0, {k: v for k, v in one.norms.items() if k != ROUTER}) for one in norms_of_training()]
    for second in (norms_of_training(3), fewer, []):
        with pytest.raises(RunError, match="other steps or parameters"):
            judge_ratios(norms_of_training(), second, None, counts_from=1)


@given(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30))
def test_a_deviation_is_the_same_both_ways_and_that_of_the_ratio(a, b):
    assert deviation(a, b) == deviation(b, a)
    assert math.exp(deviation(a, b)) == pytest.approx(max(a / b, b / a), rel=1e-9)
    assert (deviation(a, b) == 0) == (a == b or math.isclose(a, b, rel_tol=1e-13))


def test_a_norm_of_a_group_is_that_of_all_its_parameters_in_the_mean_step():
    (experts, *_) = judge_ratios(norms_of_training(), norms_of_training(), None, counts_from=3).groups
    squares = sum((step * (1 + n)) ** 2 for step in (3, 4) for n in range(4))
    assert experts.first == experts.second == pytest.approx(math.sqrt(squares / 2))


# Names as Megatron's distributed checkpoints have them, with Transformer Engine's layers and with Core's own.
NAMED = (
    ("embedding.word_embeddings.weight", "embedding"),
    ("output_layer.weight", "output layer"),
    ("decoder.final_layernorm.weight", "norms"),
    ("decoder.final_norm.weight", "norms"),
    ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
    ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norms"),
    ("decoder.layers.0.self_attention.q_layernorm.weight", "norms"),
    ("decoder.layers.0.input_layernorm.weight", "norms"),
    ("decoder.layers.0.mlp.linear_fc1.weight", "dense MLP"),
    ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "norms"),
    ("decoder.layers.1.mlp.experts.7.linear_fc2.weight", "experts"),
    ("decoder.layers.1.mlp.router.weight", "router"),
    ("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", "shared expert"),
    ("decoder.layers.2.mixer.in_proj.weight", "Mamba"),
    ("decoder.layers.2.mixer.in_proj.layer_norm_weight", "norms"),
    ("decoder.layers.2.mixer.norm.weight", "norms"),
    ("decoder.layers.2.mixer.A_log", "Mamba"),
    ("mtp.layers.0.eh_proj.weight", "other"),
)


@pytest.mark.parametrize("name, group", NAMED)
def test_a_parameter_belongs_to_what_it_is_for(name, group):
    assert parameter_group(name) == group


def test_every_group_is_tried_and_has_its_place():
    groups = {group for _, group in NAMED}
    assert {group.name for group in GROUPS} | {"other"} == groups
    assert sorted(groups_in_order(groups)) == sorted(groups)
    assert groups_in_order({"norms", "experts", "other"}) == ["experts", "norms", "other"]


def test_the_margin_stays_below_what_a_lost_micro_batch_changes():
    # Of 2 micro-batches with independent gradients one is lost: the norm falls by the root of 2.
    assert norm_ratios.MARGIN * math.log(1.05) < math.log(math.sqrt(2))
