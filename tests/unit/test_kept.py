"""An answer is made once, and again once something that it comes from has changed."""

import json
import os

import pytest

from tp_invariant_recipes.settings import conf_files, kept


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Ask for an answer of two files. returns: the function, and how often the answer was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("a.py", "b.yaml"):
        (tmp_path / name).write_text(name)
    times = []

    def make():
        times.append(len(times))
        return {"rows": [1, "two", None], "number": len(times)}

    def ask(*names):
        return kept.answer("rows", [tmp_path / name for name in names or ("a.py", "b.yaml")], make)

    return ask, times


def test_an_answer_is_made_once(made, tmp_path):
    ask, times = made
    assert ask() == ask() == {"rows": [1, "two", None], "number": 1}
    assert len(times) == 1


CHANGES = {
    "another size": lambda folder: (folder / "a.py").write_text("longer"),
    "another time": lambda folder: os.utime(folder / "b.yaml", ns=(1, 1)),
    "no file": lambda folder: (folder / "a.py").unlink(),
    "a torn cache": lambda folder: (folder / "cache/tpi/rows.json").write_text("{"),
    "a cache without its stamp": lambda folder: (folder / "cache/tpi/rows.json").write_text('{"answer": 3}'),
    "a cache of something else": lambda folder: (folder / "cache/tpi/rows.json").write_text(
        json.dumps({"stamp": "0", "answer": 3})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_it_is_made_again(made, tmp_path, change):
    ask, times = made
    ask()
    CHANGES[change](tmp_path)
    assert ask()["number"] == 2
    assert ask()["number"] == 2
    assert len(times) == 2


def test_another_file_is_another_answer(made):
    ask, times = made
    ask("a.py")
    ask("a.py", "b.yaml")
    assert len(times) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(made, tmp_path):
    (tmp_path / "cache").write_text("a file")
    ask, _ = made
    assert [ask()["number"], ask()["number"]] == [1, 2]


def test_the_models_come_from_both_trees_and_the_package(here, monkeypatch, tmp_path):
    mine = tmp_path / "config/tpi/model"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    names = {path.name for path in conf_files.sources()}
    assert {"own.yaml", "qwen3_8b.yaml", "layout.py"} <= names
