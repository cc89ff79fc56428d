"""Numbers beyond all sense are refused by name at once; the largest that make sense are not."""

import pytest

from tests.unit.check.refusals import problems_of
from tp_invariant_recipes.check import typed as typed_rules
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.settings.keys import SHORT_KEYS

COUNTS = [key.name for key in SHORT_KEYS.values() if key.type is int and key.name != "seed"]


def test_every_count_has_a_bound():
    assert set(typed_rules.SHORT) == set(COUNTS)


@pytest.mark.timeout(20)
def test_a_count_beyond_its_bound_is_refused_by_its_name():
    beyond = [f"{key}={limit + 1}" for key, limit in typed_rules.SHORT.items()]
    says = {f"{key}={limit + 1}: must be at most {limit}" for key, limit in typed_rules.SHORT.items()}
    assert {problem for problem in problems_of(*beyond) if "must be at most" in problem} == says
    tree = compose("qwen3_toy", (), device="cpu").config.sections
    for key, limit in typed_rules.SHORT.items():
        section, _, name = SHORT_KEYS[key].path.partition(".")
        tree[section][name] = limit
    assert typed_rules.wrong(tree) == {}


@pytest.mark.parametrize("key, limit", (("model.num_layers", typed_rules.LARGEST), ("slurm.tries", typed_rules.WIDEST)))
@pytest.mark.timeout(20)
def test_any_other_whole_number_has_one_too(key, limit):
    assert problems_of(f"{key}={26 * '9'}") == [f"{key}={26 * '9'}: must be at most {limit}"]


@pytest.mark.timeout(20)
def test_a_number_with_more_digits_than_python_reads():
    assert problems_of("gbs=" + 5000 * "9", "tp=3")[0] == f"'gbs={26 * '9'}…' is not KEY=VALUE: too many digits"


@pytest.mark.timeout(20)
def test_other_mistakes_are_listed_beside_it():
    problems = problems_of("iters=" + 26 * "9", "gbs=" + 26 * "9", "tp=3", "seq=-99999999999999999999")
    assert {problem.partition("=")[0] for problem in problems[:3]} == {"gbs", "iters", "seq"}
    assert any(problem.startswith("tp=3 does not divide") for problem in problems[3:])
