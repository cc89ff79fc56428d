# SPDX-License-Identifier: Apache-2.0
"""The catalogue: every row accepts what it names and refuses the rest, with the key and its values."""

import math

import pytest
import torch

from tests.rules import limits_of
from tests.trees import with_fields
from tp_invariant_recipes.config.compose import compose
from tp_invariant_recipes.errors import lines
from tp_invariant_recipes.fields import catalogue
from tp_invariant_recipes.fields import field as rows
from tp_invariant_recipes.fields.catalogue import SECTIONS, adjustable, field_at, in_fingerprint
from tp_invariant_recipes.fields.field import ANY, BOOL, NONE, NOT_SET, NUMBER, THRESHOLD
from tp_invariant_recipes.fields.model import MODEL
from tp_invariant_recipes.settings import field_table, schema

TABLES = {**SECTIONS, "model": MODEL}
ROWS = [
    (section, name)
    for section, table in TABLES.items()
    for name, field in table.named.items()
    if field.allowed is not NONE
]
# Sections whose other fields may be anything.
OPEN = [section for section, table in SECTIONS.items() if table.otherwise.allowed is ANY]
TREE = compose("qwen3_toy", device="cpu").config
# What a row of each kind accepts, and what it refuses.
KINDS = {
    NUMBER: ((0, 1, -0.5, 1e-8, None), (math.nan, math.inf, -math.inf, True, "1", [1])),
    THRESHOLD: ((0.5, None, math.inf), (math.nan, -math.inf, False, "1")),
    BOOL: ((True, False), (None, 0, 1, "true")),
    rows.EMPTY: ((None, [], {}, False), (1, "x", [0])),
    ANY: ((None, 1, "text", [], print), ()),
}


def refused(section, given, *, default=NOT_SET) -> list[str]:
    """default: of fields without a row."""
    return lines(catalogue.refused(section, given, lambda _, value: value is default))


def test_a_row_accepts_its_values_and_refuses_others_with_the_one_to_set():
    for section, field in ROWS:
        key = f"{section}.{field}"
        values, why = field_at(key).allowed, field_at(key).why
        accepted, wrong = KINDS.get(values, ((), (object(), "another", -7, [None])))
        assert [value for value in accepted if refused(section, {field: value})] == [], key
        for value in wrong:
            (line,) = refused(section, {field: value}) or (key,)
            assert line.startswith(f"{key}=")
            assert line.endswith(f": {why}; {values.remedy.format(key=key)}")
            assert key in line.rpartition(";")[2]


TYPED = {"true": True, "false": False, "null": None, "[]": []}


def test_a_row_of_named_values_accepts_exactly_these():
    """False is not 0 here, so that a number where a switch belongs is refused, and the other way round."""
    for section, field in ROWS:
        values = field_at(f"{section}.{field}").allowed
        for text in () if values in KINDS else values.remedy.removeprefix("{key}=").split(" or "):
            value = TYPED[text] if text in TYPED else float(text) if text[0].isdigit() else text
            assert refused(section, {field: value}) == [], (section, field, value)
            assert isinstance(value, str) or refused(section, {field: text}), (section, field, text)
            if isinstance(value, bool):
                assert refused(section, {field: int(value)}), (section, field)
                assert refused(section, {field: not value}), (section, field)


def test_a_dtype_is_the_one_of_its_name():
    for value in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert refused("optimizer", {"exp_avg_dtype": value}) == []
    for value in ("float16", "uint8", torch.float16):
        (line,) = refused("optimizer", {"exp_avg_dtype": value})
        assert line.endswith("; optimizer.exp_avg_dtype=float32 or bfloat16")


def test_what_a_recipe_is_adjusted_to_is_allowed():
    paths = dict(adjustable())
    assert paths["optimizer.main_grads_dtype"].adjust_to == "float32"
    for path, field in paths.items():
        assert field.allowed.accepts(field.adjust_to), path


CLASSES = schema.BRIDGE_SECTIONS | {"model": schema.PROVIDERS[0], "mixed_precision": schema.MIXED_PRECISION}


@pytest.mark.parametrize("section", TABLES)
def test_every_field_of_bridge_has_a_row_or_keeps_its_default(section):
    """All fields of the section's class, and one that a later release may add."""
    default, other = object(), object()
    for name in (*field_table.read()[CLASSES[section]], "a_field_of_a_later_release"):
        row = TABLES[section].field(name)
        assert (refused(section, {name: default}, default=default) == []) == (row.allowed in (ANY, NONE)), name
        problems = refused(section, {name: other}, default=default)
        assert (problems == []) == row.allowed.accepts(other), name
        assert all(problem.startswith(f"{section}.{name}=") for problem in problems)


def test_a_field_has_one_row():
    with pytest.raises(ValueError, match="two rows for"):
        rows.section(rows.row(ANY, "lr", "a"), rows.row(BOOL, "lr bf16", "b"))


def test_sections_that_only_read_or_are_off_take_any_other_field():
    assert [
        *("logger", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart", "tensor_inspect")
    ] == OPEN
    for section in OPEN:
        assert refused(section, {"a_field_of_a_later_release": 1}) == []
    assert not in_fingerprint("logger.log_interval")
    assert refused("nvrx_straggler", {"enabled": True}) != []


@pytest.mark.parametrize("section", [name for name in TABLES if name not in OPEN])
def test_a_field_of_a_later_release_is_refused(section):
    name = "a_field_of_a_later_release"
    given = TREE.with_fields(section, **{name: 1})
    line = f"numerics=tree: {section}.{name}=1: the invariant numerics do not know this field; "
    assert f"{line}leave {section}.{name} unset" in limits_of(given)
    assert limits_of(with_fields(given, numerics__mode="stock")) == []


def test_a_field_without_bits_only_reads_or_moves_or_waits():
    assert not in_fingerprint("dataset.num_workers")
    assert not in_fingerprint("optimizer.log_num_zeros_in_grad")
    for key in ("optimizer.lr", "train.global_batch_size", "train.a_field_of_a_later_release", "model.hidden_size"):
        assert in_fingerprint(key)
    assert in_fingerprint("dataset.dataset_kwargs.pad_to_max_length")


# A range, the numbers at its ends, and the nearest numbers beyond them.
ENDS = (
    (rows.NOT_NEGATIVE, (0,), (-1,)), (rows.COUNT, (1,), (0,)), (rows.POSITIVE, (5e-324,), (0,)),
    (rows.SHARE, (0, 1), (-5e-324, 1 + 2**-52)), (rows.BELOW_1, (0, 1 - 2**-53), (-5e-324, 1)),
    (rows.PART, (5e-324, 1), (0, 1 + 2**-52)), (rows.SEED, (1, 2**32 - 2**24), (0, 2**32 - 2**24 + 1)),
    (rows.NICE, (-20, 19), (-21, 20)), (rows.PORT, (1, 65535), (0, 65536)),
)  # fmt: skip


@pytest.mark.parametrize("row", ENDS, ids=lambda row: row[0].words)
def test_a_range_ends_where_its_words_say(row):
    limits, inside, outside = row
    assert [limits.holds(number) for number in inside] == [True] * len(inside)
    assert [limits.holds(number) for number in outside] == [False] * len(outside)
