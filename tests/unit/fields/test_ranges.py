"""The ends of what numbers may be."""

import pytest

from tp_invariant_recipes.fields import field

# A range, the numbers at its ends, and the nearest numbers beyond them.
ENDS = (
    (field.NOT_NEGATIVE, (0,), (-1,)),
    (field.COUNT, (1,), (0,)),
    (field.POSITIVE, (5e-324,), (0,)),
    (field.SHARE, (0, 1), (-5e-324, 1 + 2**-52)),
    (field.BELOW_1, (0, 1 - 2**-53), (-5e-324, 1)),
    (field.PART, (5e-324, 1), (0, 1 + 2**-52)),
    (field.SEED, (1, 2**32 - 2**24), (0, 2**32 - 2**24 + 1)),
    (field.NICE, (-20, 19), (-21, 20)),
    (field.PORT, (1, 65535), (0, 65536)),
)


@pytest.mark.parametrize("row", ENDS, ids=lambda row: row[0].words)
def test_a_range_ends_where_its_words_say(row):
    limits, inside, outside = row
    assert [limits.holds(number) for number in inside] == [True] * len(inside)
    assert [limits.holds(number) for number in outside] == [False] * len(outside)
