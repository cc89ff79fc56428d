"""Numbers and their nouns: "1 step", everywhere."""

import re
from pathlib import Path

import pytest

import tp_invariant_recipes
from tp_invariant_recipes.plural import counted, few


@pytest.mark.parametrize("count, words", ((0, "0 steps"), (1, "1 step"), (2, "2 steps")))
def test_one_is_singular(count, words):
    assert counted(count, "step") == words
    assert counted(10_000, "step", ",") == "10,000 steps"


@pytest.mark.parametrize(
    "most, separator, words", ((3, ", ", "a, b, c"), (2, ", ", "a, b and 1 more"), (1, "; ", "a; and 2 more"))
)
def test_a_long_list_is_cut(most, separator, words):
    assert few(["a", "b", "c"], most, separator) == words


def test_nothing_else_makes_a_plural_of_a_number():
    """A conditional "s" beside a number is this function's work."""
    own = re.compile(r"""['"]s['"] (if|\*)|==? 1 else f?['"]\{?\w*\}? ?(steps|ranks|runs|parameters)\b""")
    assert own.search("""f"{n} run{'s' * (n != 1)}" """), "the control"
    root = Path(tp_invariant_recipes.__file__).parent
    results = [
        f"{file.name}: {line}"
        for file in root.rglob("*.py")
        for line in file.read_text().splitlines()
        if own.search(line)
    ]
    assert [line for line in results if not line.startswith(("plural.py", *ELSEWHERE))] == []


# A noun without its number beside it.
ELSEWHERE = ("hang.py", "text.py", "result.py")
