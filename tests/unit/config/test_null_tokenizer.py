"""The size of a NullTokenizer's vocabulary means the same whichever way Megatron-Core counts."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_invariant_recipes.config.null_tokenizer import eod_id, megatron_vocab_size
from tp_invariant_recipes.errors import ConfigError


@dataclass
class CountedOnTop:
    """As in Megatron-Core up to 0.17."""

    given: int

    @property
    def eod(self) -> int:
        return self.given

    @property
    def vocab_size(self) -> int:
        return self.given + 1


class CountedIn(CountedOnTop):
    """As in Megatron-Core 0.19."""

    @property
    def eod(self) -> int:
        return self.given - 1

    @property
    def vocab_size(self) -> int:
        return self.given


class FirstId(CountedIn):
    """Nobody's convention."""

    eod = 0


class CountedTwice(CountedOnTop):
    """The right eod, but one id more than there are."""

    @property
    def vocab_size(self) -> int:
        return self.given + 2


@given(size=st.integers(1, 2**20), includes_eod=st.booleans())
def test_one_meaning_under_both_conventions(size, includes_eod):
    expected = size - 1 if includes_eod else size
    assert eod_id(size, includes_eod=includes_eod) == expected
    for convention in (CountedOnTop, CountedIn):
        made = convention(megatron_vocab_size(size, includes_eod=includes_eod, tokenizer=convention))
        assert made.eod == expected
        assert made.vocab_size == expected + 1


@pytest.mark.parametrize(
    "convention, includes_eod, given_to_it",
    ((CountedOnTop, True, 511), (CountedOnTop, False, 512), (CountedIn, True, 512), (CountedIn, False, 513)),
)
def test_the_number_handed_to_megatron(convention, includes_eod, given_to_it):
    assert megatron_vocab_size(512, includes_eod=includes_eod, tokenizer=convention) == given_to_it


@pytest.mark.parametrize("convention", (FirstId, CountedTwice))
def test_a_class_of_neither_convention_is_refused(convention):
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_includes_eod has no meaning here"):
        megatron_vocab_size(512, includes_eod=True, tokenizer=convention)
