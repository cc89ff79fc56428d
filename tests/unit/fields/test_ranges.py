"""The ends of what numbers may be."""

import pytest

from tp_invariant_recipes.fields import ranges

# A range, the numbers at its ends, and the nearest numbers beyond them.
ENDS = (
    (ranges.NOT_NEGATIVE, (0,), (-1,)),
    (ranges.COUNT, (1,), (0,)),
    (ranges.POSITIVE, (5e-324,), (0,)),
    (ranges.SHARE, (0, 1), (-5e-324, 1 + 2**-52)),
    (ranges.BELOW_1, (0, 1 - 2**-53), (-5e-324, 1)),
    (ranges.PART, (5e-324, 1), (0, 1 + 2**-52)),
    (ranges.SEED, (1, 2**32 - 2**24), (0, 2**32 - 2**24 + 1)),
    (ranges.NICE, (-20, 19), (-21, 20)),
    (ranges.PORT, (1, 65535), (0, 65536)),
)


@pytest.mark.parametrize("row", ENDS, ids=lambda row: row[0].words)
def test_a_range_ends_where_its_words_say(row):
    limits, inside, outside = row
    assert [limits.holds(number) for number in inside] == [True] * len(inside)
    assert [limits.holds(number) for number in outside] == [False] * len(outside)
