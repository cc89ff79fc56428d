"""What a ledger is asked to record is checked before anything starts."""

import pytest

from tests.rules import table_problems
from tests.trees import with_fields
from tp_invariant_recipes.check import recording
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import ConfigError

TREE = compose("qwen3_toy", [], device="cpu").config


def test_digests_are_recorded_at_every_step_unless_told_otherwise():
    assert TREE.section("ledger") == {"digests": 1, "state_digests": 10, "experts": "auto", "trace": None, "dump": []}
    assert table_problems(recording, TREE) == []


@pytest.mark.parametrize("text, first, last", (("1:1", 1, 1), ("3:12", 3, 12)))
def test_steps_include_both_ends(text, first, last):
    assert list(recording.steps(text)) == list(range(first, last + 1))


@pytest.mark.parametrize("text", ("", "3:", ":3", "0:3", "3:2", "a:b", "1:2:3", "-1:2", "1.0:2"))
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="FIRST:LAST"):
        recording.steps(text)


@pytest.mark.parametrize(
    "fields, words",
    (
        ({"ledger__digests": -1}, "ledger.digests=-1: must be 0 (never) or a number of steps"),
        ({"ledger__trace": "1:2", "model__cuda_graph_impl": "local"}, "model.cuda_graph_impl=local; cuda_graph=off"),
    ),
)
def test_each_mistake_names_the_key(fields, words):
    (problem,) = table_problems(recording, with_fields(TREE, **fields))
    assert words in problem


def test_the_command_line_takes_them_and_lists_all_that_is_wrong():
    tree = compose("qwen3_toy", ["ledger.trace=1:3", "ledger.digests=10", "ledger.dump=[weights/a.b]"]).config
    read = {"digests": 10, "state_digests": 10, "experts": "auto", "trace": "1:3", "dump": ["weights/a.b"]}
    assert tree.section("ledger") == read
    with pytest.raises(ConfigError) as caught:
        compose("qwen3_toy", ["ledger.trace=3:1", "ledger.digests=-1", "ledger.digest=3", "tp=3"])
    assert len(caught.value.problems) >= 4
    assert "ledger.digests" in str(caught.value)
