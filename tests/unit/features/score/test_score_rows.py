"""Which models `tpi score` computes sequence by sequence: those whose bits depend on the rows beside."""

import pytest

from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.config.overrides import parse_all
from tp_invariant_recipes.features.inference import model as score_model
from tp_invariant_recipes.features.score.rank import depends_on_rows

CASES = (
    ("qwen3_next_toy", "gpu", True),  # in the interpreter its kernels take each sample by itself; no GPU has shown it
    ("qwen3_next_toy", "cpu", True),
    ("qwen3_moe_toy", "gpu", False),
    ("nemotron3_nano_toy", "gpu", True),  # a library's scan
    ("qwen3_toy precision=mxfp8", "gpu", True),
    ("qwen3_toy numerics=stock", "cpu", False),
)


@pytest.mark.parametrize("words, device, alone", CASES)
def test_rows(words, device, alone):
    model, *more = words.split()
    assert depends_on_rows(compose(model, more, device=device).config) is alone


def test_a_score_may_choose_how_ranks_sum_and_trains_nothing():
    choices = parse_all(["device.peer_memory=auto", "device.check_memory=false"])
    assert [score_model._refused(override, "tpi score") is None for override in choices] == [True, False]
