"""The table of Bridge's fields against Bridge itself."""

import json

from tp_invariant_recipes.settings import field_table, schema
from tp_invariant_recipes.settings.values import WrongType, convert, describe

VALUES = (True, 0, 3, -1, 1.5, "3", "x", "auto", None, [1], {"a": 1})


def taken(value, hint):
    try:
        return repr(convert(value, hint))
    except WrongType:
        return "refused"


def test_the_table_says_what_bridge_says(tmp_path, monkeypatch):
    monkeypatch.setattr(field_table, "in_environment", lambda: tmp_path / "none")
    schema.write_field_table(field_table.in_cache())
    table = field_table.read()
    assert len(table) == len(schema.BRIDGE_SECTIONS) + len(schema.PROVIDERS)
    for path, fields in table.items():
        hints = schema.fields(schema._located(path))
        assert fields.keys() == hints.keys(), path
        for name, hint in fields.items():
            if hint is not None:
                assert describe(hint) == describe(hints[name]), f"{path}.{name}"
                assert [taken(v, hint) for v in VALUES] == [taken(v, hints[name]) for v in VALUES], f"{path}.{name}"


def test_the_first_import_writes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(field_table, "in_environment", lambda: tmp_path / "none")
    assert field_table.read() == {}
    schema._keep_fields.cache_clear()
    schema.bridge_class.cache_clear()
    schema.section_class("train", {})
    assert schema.PROVIDERS[0] in field_table.read()


def test_the_table_beside_the_module_is_that_of_the_lock(tmp_path):
    """If this fails after an upgrade, write `classes` of the new table into the file, and an empty `sources`."""
    schema.write_field_table(tmp_path / "table.json")
    of_the_lock = json.loads(field_table.of_the_locks().read_text())
    assert json.loads((tmp_path / "table.json").read_text())["classes"] == of_the_lock["classes"]
    assert of_the_lock["sources"] == {}
