"""A kept value is read as written; a stamp changes with every file that it covers."""

import os

import pytest

from tp_invariant_recipes.settings import conf_files
from tp_invariant_recipes.start import kept

ROWS = {"rows": [1, "two", None]}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a.py", "b.yaml"):
        (tmp_path / name).write_text(name)
    return tmp_path / "cache"


def test_what_is_kept_is_read_as_written(cache):
    kept.keep("rows", ROWS)
    assert kept.find("rows") == ROWS
    (cache / "tpi/rows.json").write_text("{")
    with pytest.raises(ValueError):
        kept.find("rows")


def test_a_cache_that_cannot_be_written_costs_time_only(cache):
    cache.write_text("a file")
    kept.keep("rows", ROWS)
    with pytest.raises(OSError):
        kept.find("rows")


CHANGES = {
    "another size": lambda folder: (folder / "a.py").write_text("longer"),
    "another time": lambda folder: os.utime(folder / "b.yaml", ns=(1, 1)),
    "no file": lambda folder: (folder / "a.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_stamp(cache, tmp_path, change):
    sources = [tmp_path / name for name in ("a.py", "b.yaml")]
    before = kept.stamp(sources)
    assert kept.stamp(reversed(sources)) == before != kept.stamp(sources[:1])
    CHANGES[change](tmp_path)
    assert kept.stamp(sources) != before


def test_the_models_come_from_both_trees_and_the_package(here, monkeypatch, tmp_path):
    mine = tmp_path / "config/tpi/model"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    names = {path.name for path in conf_files.sources()}
    assert {"own.yaml", "qwen3_8b.yaml", "layout.py"} <= names
