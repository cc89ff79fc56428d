"""`tpi init` writes files to begin with, and overwrites none. tests/distributed/test_init_runs.py trains them."""

import shlex
from pathlib import Path

import pytest

from tests.unit.docs.markdown import DOCUMENTS
from tp_invariant_recipes.cli.init import KINDS, TEMPLATES


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_a_file_and_never_another_time(cli, here, kind):
    done = cli("init", kind)
    assert done.status == 0
    assert done.out.startswith(f"wrote {KINDS[kind].path}")
    files = {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}
    again = cli("init", kind)
    assert (again.status, again.out) == (2, "")
    assert f"{KINDS[kind].path} exists, and nothing is overwritten: tpi init {kind} PATH" in again.err
    assert files == {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_to_nowhere_is_not_followed(cli, here, kind):
    (here / KINDS[kind].path).symlink_to(here / "elsewhere")
    assert cli("init", kind).status == 2
    assert not (here / "elsewhere").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_of_ones_own_is_in_the_commands(cli, here, kind):
    path = Path("deep") / f"my own {KINDS[kind].path}"
    lines = cli("init", kind, path).out.splitlines()
    assert path.exists()
    for line in lines[1:]:
        assert any(str(path) in word for word in shlex.split(line))


def test_a_wrong_kind_names_the_kinds(cli, here):
    done = cli("init", "recip")
    assert done.status == 2
    assert "tpi init recip: KIND is one of recipe, sft, lora, cluster; did you mean 'recipe'?" in done.err


def test_a_name_that_no_command_would_take(cli, here):
    done = cli("init", "recipe", "mine")
    assert "mine: the name of the file must end in .py: tpi init recipe mine.py" in done.err
    assert not (here / "mine").exists()


def test_a_folder_that_cannot_be_made(cli, here):
    done = cli("init", "recipe", "taken/file/mine.py")
    assert done.status == 2
    assert "taken/file" in done.err


def test_every_template_belongs_to_a_kind():
    assert {folder.name for folder in TEMPLATES.iterdir()} == {*KINDS, "examples"}


def test_the_page_shows_the_recipe_that_is_written():
    """docs/recipes.md leaves lines out with `…`, and adds none."""
    written = iter((TEMPLATES / "recipe" / "my_recipes.py.txt").read_text().splitlines())
    page = next(one for one in DOCUMENTS if one.name == "docs/recipes.md").text
    block = page.partition("    def small():\n")[2].partition("    return cfg\n")[0]
    shown = [line[4:] for line in f"    def small():\n{block}    return cfg".splitlines() if line.strip() != "…"]
    assert len(shown) == 8
    assert [line for line in shown if line not in written] == []
