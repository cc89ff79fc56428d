# SPDX-License-Identifier: Apache-2.0
"""The table of refusals: each row is refused by its rules and by no other; the neighbours beside it compose."""

import pytest

from tests.unit.check.refusals import FAMILIES, message, problems
from tp_invariant_recipes.errors import OR_STOCK

ROWS = [(family, words) for family, rows in FAMILIES.items() for words in rows.refused]
TAKEN = [(family, words) for family, rows in FAMILIES.items() for words in rows.taken]
TAKEN_FIELDS = [(family, words) for family, rows in FAMILIES.items() for words in rows.taken_fields]
# Rows whose fields Bridge need not check go through Hydra as well: every sixth, and in a release all.
AS_TYPED = [(family, words) for family, words in ROWS if family in ("NUMBERS", "RELATIONS", "NUMBERS_OF_EXPERTS")]
SPARING = [row if n % 6 == 0 else pytest.param(*row, marks=pytest.mark.release) for n, row in enumerate(AS_TYPED)]
# Rules of many fields, whose problems name the one that is wrong.
OF_FIELDS = {"range", "type", "field", "no_such_field", "replaced", "per_layer", "multiple", "at_most"}


def ids_of(rows):
    return [" ".join(row) for row in rows]


def rules_of(lines: list[str]) -> tuple[str, ...]:
    return tuple(line.rule for line in lines)


@pytest.mark.parametrize("family, words", ROWS, ids=ids_of(ROWS))
def test_a_row_is_refused_by_its_rules_alone(family, words):
    rows = FAMILIES[family]
    result = message(f"{rows.run} {words}") if rows.typed else message(rows.run, words)
    assert OR_STOCK in result or not rows.or_stock
    lines = [line for line in result if line != OR_STOCK]
    assert rules_of(lines) == rows.refused[words], lines
    names = [word.partition("=")[0].rpartition(".")[2] for word in words.split()]
    for line in lines:
        assert line.rule not in OF_FIELDS or any(name in line for name in names), line


@pytest.mark.parametrize("family, words", SPARING, ids=ids_of(AS_TYPED))
def test_hydra_gives_the_same_problem(family, words):
    assert rules_of(problems(f"{FAMILIES[family].run} {words}")) == FAMILIES[family].refused[words]


@pytest.mark.parametrize("family, words", TAKEN, ids=ids_of(TAKEN))
def test_a_neighbour_composes(family, words):
    assert problems(f"{FAMILIES[family].run} {words}") == []


@pytest.mark.parametrize("family, words", TAKEN_FIELDS, ids=ids_of(TAKEN_FIELDS))
def test_a_neighbouring_field_is_taken(family, words):
    assert problems(FAMILIES[family].run, words) == []


@pytest.mark.parametrize("words, offered", (("precision=fp8_tensorwise seq=64", False), ("model.qk_clip=true", True)))
def test_stock_is_offered_only_where_it_meets_no_other_problem(words, offered):
    """A CPU has no FP8 GEMMs under stock numerics either."""
    assert (OR_STOCK in message(f"qwen3_toy {words}")) == offered


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_run_that_composes(family):
    assert problems(FAMILIES[family].run) == []


# A run -> the first rule that says what its mode has no version of.
BEYOND = {
    "deepseek_v3_toy numerics=gather": "numerics=gather: multi-latent attention is covered by numerics=tree and "
    "numerics=portable only",
    "deepseek_v3_toy numerics=portable model.mscale_all_dim=0.5": "numerics=portable: YaRN that multiplies cosines "
    "has no portable version; model.mscale_all_dim with the value of model.mscale",
    "qwen3_moe_toy numerics=gather": "numerics=gather: experts are covered by numerics=tree and numerics=portable only",
    "nemotron3_nano_toy numerics=gather": "numerics=gather: Mamba layers are covered by numerics=tree only",
    "nemotron3_nano_toy numerics=portable": "numerics=portable: Mamba layers have no portable version; numerics=tree",
}


@pytest.mark.parametrize("run", BEYOND)
def test_a_mode_says_what_it_has_no_version_of(run):
    assert BEYOND[run] in problems(run)


def test_mamba_layers_go_through_a_sequence_in_order():
    assert any("Mamba layers go through a sequence in order" in line for line in problems("nemotron3_nano_toy cp=2"))


@pytest.mark.parametrize("mode", ("tree", "gather"))
def test_all_that_is_beyond_is_reported_at_once(mode):
    rows = {words: rules for words, rules in FAMILIES["INVARIANCE"].refused.items() if not words.startswith("mixed_")}
    actual = rules_of(problems(f"qwen3_toy numerics={mode} dp=4 gbs=4", " ".join(rows)))
    for words, rules in rows.items():
        taken = mode == "gather" and "grad_norm" in words  # its norm is a sum of whole gradients
        assert ({*rules} <= {*actual}) is not taken, words
