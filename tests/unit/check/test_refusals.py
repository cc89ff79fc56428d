"""The table of refusals: each row is one problem, with its words; the neighbours beside it compose."""

import pytest

from tests.unit.check import refusals
from tests.unit.check.refusals import Family, fits, message, problems
from tp_invariant_recipes.errors import OR_STOCK

FAMILIES = {name: family for name, family in vars(refusals).items() if isinstance(family, Family)}
ROWS = [(family, words) for family, rows in FAMILIES.items() for words in rows.refused]
TAKEN = [(family, words) for family, rows in FAMILIES.items() for words in rows.taken]
TAKEN_FIELDS = [(family, words) for family, rows in FAMILIES.items() for words in rows.taken_fields]
# Rows whose fields Bridge need not check go through Hydra as well: every sixth, and in a release all.
AS_TYPED = [(family, words) for family, words in ROWS if family in ("NUMBERS", "RELATIONS", "NUMBERS_OF_EXPERTS")]
SPARING = [row if n % 6 == 0 else pytest.param(*row, marks=pytest.mark.release) for n, row in enumerate(AS_TYPED)]


def ids_of(rows):
    return [" ".join(row) for row in rows]


def own_problems(family: Family, words: str, results: list[str]) -> list[str]:
    """The problems that are not those that the family has beside this row."""
    beside = family.beside.get(words, ())
    rest = [problem for problem in results if not problem.startswith(beside)]
    assert len(results) - len(rest) == (1 if isinstance(beside, str) else len(beside))
    return rest


@pytest.mark.parametrize("family, words", ROWS, ids=ids_of(ROWS))
def test_a_row_is_refused_with_its_words_alone(family, words):
    rows = FAMILIES[family]
    result = message(f"{rows.run} {words}") if rows.typed else message(rows.run, words)
    assert OR_STOCK in result or not rows.or_stock
    (problem,) = own_problems(rows, words, [problem for problem in result if problem != OR_STOCK])
    assert fits(problem, rows.refused[words], rows.begins), problem


@pytest.mark.parametrize("family, words", SPARING, ids=ids_of(AS_TYPED))
def test_hydra_gives_the_same_problem(family, words):
    (problem,) = problems(f"{FAMILIES[family].run} {words}")
    assert fits(problem, FAMILIES[family].refused[words])


def test_a_model_without_experts_may_have_the_settings_of_experts():
    words = " ".join(refusals.EXPERTS.refused)
    assert [problem for problem in problems(refusals.EXPERTS.run, words) if problem.startswith("numerics=")]
    actual = problems(refusals.EXPERTS.run, f"{words} model.num_moe_experts=null")
    assert not [problem for problem in actual if problem.startswith("numerics=")]


@pytest.mark.parametrize("family, words", TAKEN, ids=ids_of(TAKEN))
def test_a_neighbour_composes(family, words):
    assert problems(f"{FAMILIES[family].run} {words}") == []


@pytest.mark.parametrize("family, words", TAKEN_FIELDS, ids=ids_of(TAKEN_FIELDS))
def test_a_neighbouring_field_is_taken(family, words):
    assert problems(FAMILIES[family].run, words) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_run_that_composes(family):
    assert problems(FAMILIES[family].run) == []


@pytest.mark.parametrize("override", refusals.OF_TREE)
def test_tree_takes_what_portable_refuses(override):
    assert problems(f"qwen3_toy numerics=tree {override}") == []


@pytest.mark.parametrize("override", refusals.OF_TREES_EXPERTS)
def test_tree_takes_what_portable_refuses_of_experts(override):
    assert problems(f"qwen3_moe_toy numerics=tree {override}") == []


@pytest.mark.parametrize("mode", refusals.OTHER_MODES)
def test_latent_attention_is_of_tree(mode):
    says = f"numerics={mode}: multi-latent attention is covered by numerics=tree only"
    assert says in problems(f"deepseek_v3_toy numerics={mode}")


def test_gather_has_neither_experts_nor_mamba():
    assert "numerics=gather: experts are covered by numerics=tree and numerics=portable only" in problems(
        "qwen3_moe_toy numerics=gather"
    )
    assert "numerics=gather: Mamba layers are covered by numerics=tree only" in problems(
        "nemotron3_nano_toy numerics=gather"
    )
    assert any("Mamba layers have no" in line for line in problems("nemotron3_nano_toy numerics=portable"))
    assert any("Mamba layers go through a sequence in order" in line for line in problems("nemotron3_nano_toy cp=2"))


@pytest.mark.parametrize("mode", ("tree", "gather"))
def test_all_that_is_beyond_is_reported_at_once(mode):
    rows = {words: says for words, says in refusals.INVARIANCE.refused.items() if not words.startswith("mixed_")}
    actual = problems(f"qwen3_toy numerics={mode} dp=4 gbs=4", " ".join(rows))
    for words, says in rows.items():
        taken = mode == "gather" and "grad_norm" in words  # its norm is a sum of whole gradients
        assert any(fits(problem, says, f"numerics={mode}: ") for problem in actual) is not taken, words
