# SPDX-License-Identifier: Apache-2.0
"""One value against one type hint: what fits is converted, what does not is refused in words."""

# ruff: noqa: UP007, UP045 -- Optional[X] and X | None are different objects, and Bridge uses both

import collections.abc
import os
import textwrap
import typing
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tp_invariant_recipes.settings.values import WrongType, convert, named


class Colour(Enum):
    red = 1
    blue = 2


class Level(IntEnum):
    low = 1
    high = 2


Function = typing.Callable[[int], int]
Other = collections.abc.Callable[..., Any]

# Value, hint, what it becomes.
FITS = (
    (3, int, 3), ("3", int, 3), (3.0, int, 3), (3, float, 3.0), ("1e-3", float, 1e-3), (True, bool, True),
    ("off", bool, False), (1, bool, True), ("x", str, "x"), (None, int | None, None), (None, Optional[str], None),
    (2, Optional[float], 2.0), (True, bool | None, True), (True, int | bool, True),
    ("bf16", Literal["bf16", "fp16"], "bf16"), (None, Literal["a"] | None, None), ("red", Colour, Colour.red),
    ("red", Colour | None, Colour.red), ("high", Level, Level.high), (2, Level, Level.high),
    ([1, 2], list[int], [1, 2]), ([1, 2], tuple[int, int], (1, 2)), ([1, 2], Optional[tuple[int, int]], (1, 2)),
    ({"a": 1}, dict[str, int], {"a": 1}), ([["x"], None], Any, [["x"], None]), ("a/b", Path, Path("a/b")),
    ("os.path.join", Function, os.path.join), ("os.path.join", Optional[Other], os.path.join),
    ("textwrap.TextWrapper.wrap", Other, textwrap.TextWrapper.wrap), ("plain", Union[Function, str], "plain"),
    (None, Optional[Function], None),
    *((text, torch.dtype, torch.bfloat16) for text in ("bfloat16", "torch.bfloat16", "bf16")),
)  # fmt: skip


@pytest.mark.parametrize("value, hint, expected", FITS, ids=[f"{value!r} as {hint}" for value, hint, _ in FITS])
def test_what_fits_is_converted(value, hint, expected):
    result = convert(value, hint)
    assert (type(result), result) == (type(expected), expected)


# Value, hint, what is said to have been expected.
WRONG = (
    (True, int, "int"), (False, float, "float"), (True, Optional[int], "int or null"),
    (True, int | str, "int or str"), (None, int, "int"), ("x", int, "int"), (2.5, int, "int"), ("x", float, "float"),
    ("x", bool, "bool"), (2, bool, "bool"), (3, str, "str"), ({"x": 3}, str | None, "str or null"),
    ("fp64", Literal["bf16", "fp16"], "one of 'bf16', 'fp16'"), ("x", Literal["a"] | None, "one of 'a' or null"),
    ("green", Colour, "one of red, blue"), ("green", Colour | None, "one of red, blue or null"),
    ([1, 2, 3], tuple[int, int], "tuple"), (["x"], list[int], "list"),
    ("os.path.joyn", Function, "the dotted path of a function"),
    ("no.such.module", Function, "the dotted path of a function"),
    ("os.sep", Function, "the dotted path of a function"), (3, Function, "Callable"),
    (3, Optional[Function], "Callable or null"),
    *((text, torch.dtype, "dtype, such as bfloat16 (or bf16)") for text in ("nn", "torch.nn", "float65", "b")),
)  # fmt: skip


@pytest.mark.parametrize("value, hint, expected", WRONG, ids=[f"{value!r} as {hint}" for value, hint, _ in WRONG])
def test_what_does_not_fit_is_refused_in_words(value, hint, expected, capfd):
    with pytest.raises(WrongType) as error:
        convert(value, hint)
    assert str(error.value).startswith(f"expected {expected}")
    assert "\n" not in str(error.value)
    assert "typing." not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_hint_that_says_nothing_lets_everything_pass():
    class Unknown:
        pass

    assert convert("x", Any) == "x"
    assert convert("x", "NameThatOnlyATypeCheckerKnows") == "x"
    mine = Unknown()
    assert convert(mine, Unknown) is mine


def test_a_module_that_breaks_when_imported_names_nothing(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert named("broken_module.function") is None


@given(st.integers(-(2**62), 2**62) | st.booleans() | st.none() | st.floats() | st.text())
@example("NAN")
def test_a_converted_value_is_converted_to_itself(value):
    for hint in (int, float, bool, str, Optional[int], Optional[float], int | str):
        try:
            once = convert(value, hint)
        except WrongType:
            continue
        assert repr(convert(once, hint)) == repr(once)  # a NaN is no other NaN's equal
        assert type(convert(once, hint)) is type(once)
